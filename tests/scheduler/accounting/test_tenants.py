"""The number of a tenant's live jobs is limited."""

import pytest

from plexrl import errors
from plexrl.scheduler.queries.views import usage_view
from plexrl.scheduler.rules.config import core_settings, with_core_settings
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster, config


def cluster_of(**changes: object) -> FakeCluster:
    cluster = FakeCluster(tenant_live_jobs_max=2, **changes)
    for name in ("t", "other"):
        cluster.send(ev.TenantCreated(tenant=name, key_digest=name))
    cluster.send(ev.TenantCreated(tenant="operator", key_digest="o", is_operator=True))
    return cluster


def bound(cluster: FakeCluster, live_jobs_max: int | None) -> None:
    cluster.send(
        ev.TenantConfigured(
            tenant="t",
            weight=1.0,
            jobs_max=None,
            gpus_max=None,
            gpu_seconds_max=None,
            live_jobs_max=live_jobs_max,
        )
    )


def budget(cluster: FakeCluster, gpu_seconds: float) -> None:
    cluster.send(
        ev.TenantConfigured(
            tenant="t", weight=1.0, jobs_max=None, gpus_max=None, gpu_seconds_max=gpu_seconds
        )
    )


def live(cluster: FakeCluster, tenant: str = "t") -> tuple[int, int | None]:
    (row,) = [each for each in cluster.core.list_tenants(cluster.now) if each["tenant"] == tenant]
    return row["live_jobs"], row["live_jobs_bound"]


def test_one_job_too_many_is_refused_and_the_same_one_again_is_not() -> None:
    cluster = cluster_of()
    cluster.job("a")
    cluster.job("b")
    with pytest.raises(errors.QuotaExceededError, match="2 jobs that have not ended") as caught:
        cluster.job("c")
    assert caught.value.details == {"used": 2, "quota": 2}
    cluster.job("b")
    cluster.job("c", tenant="other")
    assert live(cluster) == (2, 2)
    cluster.send(ev.JobFinished(job="a", outcome="cancelled"))
    assert live(cluster) == (1, 2)
    cluster.job("c2")


def test_a_tenants_own_bound_comes_before_the_clusters() -> None:
    cluster = cluster_of()
    bound(cluster, 1)
    cluster.job("a")
    with pytest.raises(errors.QuotaExceededError):
        cluster.job("b")
    bound(cluster, 3)
    cluster.job("b")
    cluster.job("c")
    bound(cluster, None)
    assert live(cluster) == (3, 2), "what was accepted stays"
    with pytest.raises(errors.QuotaExceededError):
        cluster.job("d")


def test_a_tenant_at_its_budget_may_only_save_checkpoints() -> None:
    cluster = cluster_of()
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.settle()
    budget(cluster, 0.0)
    with pytest.raises(errors.QuotaExceededError, match="checkpoints can still be saved"):
        cluster.job("b")
    with pytest.raises(errors.QuotaExceededError, match="checkpoints can still be saved"):
        cluster.submit("o", "a/actor", "barrier")
    cluster.submit("save", "a/actor", "save_checkpoint")
    cluster.execute(cluster.runs[0])
    cluster.pass_time(4.0)
    cluster.settle()
    assert cluster.state_of("save") == "finished"
    # The tenant has used exactly its budget, then less.
    rows = usage_view(cluster.core.cluster.state, "t")
    used = sum(row["gpu_seconds"] for row in rows)
    assert used > 0.0
    budget(cluster, used)
    with pytest.raises(errors.QuotaExceededError):
        cluster.job("b")
    budget(cluster, used * 1.01)
    cluster.job("b")
    cluster.submit("o", "a/actor", "barrier")


def test_an_operators_jobs_are_not_bounded() -> None:
    cluster = cluster_of()
    for name in "abcde":
        cluster.job(name, tenant="operator")
    assert live(cluster, "operator") == (5, None)


@pytest.mark.parametrize("restored", [False, True])
def test_a_restarted_scheduler_counts_what_it_counted(restored: bool) -> None:
    cluster = cluster_of()
    cluster.job("a")
    cluster.job("b")
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    cluster.restart_scheduler(restored=restored)
    assert live(cluster) == (1, 2)
    cluster.job("c")
    with pytest.raises(errors.QuotaExceededError):
        cluster.job("d")


def test_what_was_decided_before_there_was_a_bound_is_replayed_without_it() -> None:
    now = config(operation_overdue_s=2.0)
    before = {k: v for k, v in core_settings(now).items() if k != "operation_overdue_s"}
    assert with_core_settings(now, before).operation_overdue_s == 0.0
    assert with_core_settings(config(), core_settings(now)).operation_overdue_s == 2.0
    assert with_core_settings(now, {}).operation_overdue_s == 2.0
