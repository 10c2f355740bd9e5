"""Totals of all jobs are read in short steps, and are those of one look."""

import pytest

from plexrl.ids import TenantId
from plexrl.scheduler.queries.overview.totals import JOBS_PER_STEP, TotalsReader, cluster_totals
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster

FEW = 5
"""Jobs with a deployment: admission of hundreds is no matter of this file."""


def cluster_of(jobs: int) -> FakeCluster:
    """Every second job is of tenant `a`, and has two queued operations."""
    cluster = FakeCluster(ended_jobs=10, searches_max=1)
    cluster.start_node()
    for number in range(jobs):
        name = f"j{number}"
        cluster.job(name, tenant="ab"[number % 2])
        if number < FEW:
            cluster.deploy(f"{name}/actor")
        for index in range(2 * (number % 2) * (number < FEW)):
            cluster.submit(f"{name}:{index}", f"{name}/actor", "barrier")
    return cluster


@pytest.mark.parametrize("jobs", [0, 3, JOBS_PER_STEP + 1])
def test_a_step_reads_so_many_jobs(jobs: int) -> None:
    cluster = cluster_of(jobs).core.cluster
    steps = list(TotalsReader(cluster.state, None).steps(lambda: cluster))
    assert len(steps) == -(-jobs // JOBS_PER_STEP)
    assert cluster_totals(cluster, None, 0.0)["jobs_live"] == jobs


def test_a_tenant_is_told_of_its_own_jobs() -> None:
    cluster = cluster_of(5).core.cluster
    own = {name: cluster_totals(cluster, TenantId(name), 0.0) for name in "ab"}
    assert [own[name]["jobs_total"] for name in "ab"] == [3, 2]
    assert [own[name]["operations_pending"] for name in "ab"] == [0, 4]
    assert cluster_totals(cluster, None, 0.0)["operations_pending"] == 4


def test_jobs_that_end_between_two_steps_are_counted_as_they_are_then() -> None:
    made = cluster_of(JOBS_PER_STEP + 20)
    reader = TotalsReader(made.core.cluster.state, None)
    steps = reader.steps(lambda: made.core.cluster)
    next(steps)
    # All but the newest ten of those that have ended are forgotten.
    for number in range(JOBS_PER_STEP, JOBS_PER_STEP + 20):
        made.send(ev.JobFinished(job=f"j{number}", outcome="cancelled"))
    assert list(steps) == [None]
    assert reader.view(made.core.cluster, 0.0)["jobs_live"] == JOBS_PER_STEP
