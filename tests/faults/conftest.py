"""What every fault is measured by: the weights of the three jobs when nothing disturbs them."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.live import LiveCluster

Start = Callable[..., LiveCluster]


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """What the moments and victims of all faults follow from."""
    return int(pytestconfig.getoption("--fault-seed"))


@pytest.fixture
def chance(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Random choices of one test: the same for the same seed and test."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests of the final weights of every job."""
    cluster = LiveCluster(tmp_path_factory.mktemp("undisturbed"))
    try:
        cluster.run_jobs()
        cluster.run_job("latecomer")
        return cluster.weights()
    finally:
        cluster.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts clusters, with the given options, and ends them with the test."""
    if os.getuid() != 0:
        pytest.skip("mounts of its own need root")
    running: list[LiveCluster] = []

    def begin(**options: str) -> LiveCluster:
        running.append(LiveCluster(tmp_path / f"cluster{len(running)}", **options))
        return running[-1]

    yield begin
    for cluster in running:
        cluster.close()
