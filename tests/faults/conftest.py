"""What every fault is measured by: the weights of the three jobs when nothing disturbs them."""

import random
from collections.abc import Iterator

import pytest

from tests.faults.live import LiveCluster
from tests.hosts.network import why_impossible


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """What the moments and victims of all faults follow from."""
    return int(pytestconfig.getoption("--fault-seed"))


@pytest.fixture
def chance(seed: int, request: pytest.FixtureRequest) -> random.Random:
    """Random choices of one test: the same for the same seed and test."""
    return random.Random(f"{seed} {request.node.name}")


@pytest.fixture(scope="session")
def _namespaces() -> None:
    reason = why_impossible()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def undisturbed(_namespaces: None) -> dict[str, str]:
    """The digests of the final weights of every job."""
    cluster = LiveCluster()
    try:
        cluster.begin()
        cluster.run_jobs()
        cluster.run_job("latecomer")
        weights = cluster.weights()
    finally:
        cluster.close()
    return weights


@pytest.fixture
def cluster(_namespaces: None) -> Iterator[LiveCluster]:
    """A cluster that does not run yet; it ends with the test."""
    found = LiveCluster()
    yield found
    found.close()
