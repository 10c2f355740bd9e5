"""Runs as tasks of a real, local Ray cluster."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from plexrl.errors import UnavailableError
from plexrl.sim.search.one_run import FailedRun
from plexrl.sim.search.sweep import run_all
from tests.sim.search.test_sweep import BASE, SWEEP, FewJobs, documents

ray = pytest.importorskip("ray")
# Ray leaves sockets, files and child processes to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

STORE_BYTES = 80 << 20
CPUS = 2


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        machines = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": CPUS,
                "object_store_memory": STORE_BYTES,
                "include_dashboard": False,
            },
        )
        try:
            yield machines.address
        finally:
            machines.shutdown()


def test_tasks_give_the_bytes_of_one_run_after_another_and_a_failed_one_is_named(
    address: str,
) -> None:
    serial = documents(run_all(SWEEP, workers=1))
    wrong = replace(BASE, policy="no-such-policy")
    killed = replace(BASE, source=FewJobs(dies=True))
    seen: dict[int, int] = {}
    ended: list[int] = []
    outcomes = run_all(
        (*SWEEP, wrong, killed),
        ray_address=address,
        on_progress=lambda index, progress: seen.update({index: progress.jobs_done}),
        on_end=lambda index, _: ended.append(index),
    )
    assert documents(outcomes[: len(SWEEP)]) == serial
    assert sorted(ended) == list(range(len(SWEEP) + 2))
    assert seen, "no run told how far it is"
    failed = outcomes[len(SWEEP) :]
    assert [isinstance(each, FailedRun) for each in failed] == [True, True]
    assert "no-such-policy" in failed[0].error.message  # type: ignore[union-attr]  # by the line above
    assert "Ray task failed" in failed[1].error.message  # type: ignore[union-attr]
    assert not ray.is_initialized(), "a driver that was made for the sweep stays"


def test_without_a_cluster_there_the_error_says_so() -> None:
    with pytest.raises(UnavailableError, match="no Ray answers"):
        run_all(SWEEP, ray_address="127.0.0.1:1")
