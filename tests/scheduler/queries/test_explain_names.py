"""An operator's explanation names the jobs of all tenants; a tenant's names its own only."""

from plexrl.wire.messages.views import ExplainedJobView
from tests.scheduler.fake_cluster import FakeCluster

HIDDEN = "another tenant's job"


def sharing_cluster() -> FakeCluster:
    """`mine` waits for `theirs`, of another tenant, which runs on the GPUs that both share."""
    cluster = FakeCluster(policy="pack")
    cluster.start_node(2)
    for job, tenant in (("theirs", "u"), ("mine", "t")):
        cluster.job(job, tenant=tenant)
        cluster.deploy(f"{job}/actor")
        while cluster.launches:
            cluster.launch(cluster.launches[0])
    cluster.submit("theirs:1", "theirs/actor", "optim_step")
    cluster.submit("mine:1", "mine/actor", "optim_step")
    return cluster


def explained(cluster: FakeCluster, *, sees_all: bool) -> ExplainedJobView:
    return cluster.core.explain_job("mine", cluster.now, sees_all=sees_all)


def test_the_operator_reads_the_names_of_those_who_go_first() -> None:
    cluster = sharing_cluster()
    (row,) = explained(cluster, sees_all=True)["operations"]
    assert row["holder"] == "theirs/actor"
    assert HIDDEN not in str(explained(cluster, sees_all=True))
    polled = cluster.core.operation_view("mine:1", cluster.now, sees_all=True)
    assert polled["explanation"] is not None
    assert polled["explanation"]["holder"] == "theirs/actor"


def test_a_tenant_does_not_read_the_names_of_other_tenants_jobs() -> None:
    cluster = sharing_cluster()
    told = explained(cluster, sees_all=False)
    assert told["operations"][0]["holder"] == HIDDEN
    assert "theirs" not in str(told)
    assert "theirs" not in str(cluster.core.operation_view("mine:1", cluster.now)["explanation"])
