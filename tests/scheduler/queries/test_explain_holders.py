"""The explanation of a waiting job lists the jobs with GPUs, and which of them are abandoned."""

from typing import Any

from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages.views import HolderView
from tests.scheduler.fake_cluster import FakeCluster

TIMEOUT_S, REATTACH_S = 60.0, 300.0


def submit(cluster: FakeCluster, job: str, tenant: str = "t", **fields: Any) -> None:
    """A job with one deployment of two GPUs whose controller is silent."""
    cluster.send(
        ev.JobSubmitted(
            job=job,
            tenant=tenant,
            name=f"name of {job}",
            controller_timeout_s=TIMEOUT_S,
            reattach_timeout_s=REATTACH_S,
        )
    )
    cluster.deploy(f"{job}/actor", **fields)
    while cluster.launches:
        cluster.launch(cluster.launches[0])


def waiting(**changes: object) -> FakeCluster:
    """A cluster of two GPUs: `first` has them, and `second`, of another tenant, waits for them."""
    cluster = FakeCluster(policy="isolated", **changes)
    cluster.start_node(2)
    submit(cluster, "first", tenant="u")
    submit(cluster, "second")
    return cluster


def holders(cluster: FakeCluster, job: str = "second", **rights: bool) -> list[HolderView]:
    rights = {"sees_all": True, **rights}
    return cluster.core.explain_job(job, cluster.now, **rights)["holders"]


def beat(cluster: FakeCluster, *jobs: str, seconds: float) -> None:
    """Time passes while the controllers of some jobs send heartbeats."""
    for _ in range(round(seconds / 10)):
        cluster.pass_time(10.0)
        for job in jobs:
            cluster.send(ev.ControllerSeen(job=job))


def test_an_abandoned_job_is_listed_with_the_time_of_its_cancellation() -> None:
    cluster = waiting()
    cluster.submit("o", "first/actor", "optim_step")
    told = []
    for seconds in (20, 20, 40):
        beat(cluster, "second", seconds=seconds)
        (row,) = holders(cluster)
        assert (row["job"], row["tenant"], row["gpus"]) == ("first", "u", 2)
        told.append((row["condition"], row["silent_s"], row["cancelled_in_s"]))
    assert told == [("working", 20, None), ("silent", 40, 320), ("detached", 80, 280)]
    beat(cluster, "second", seconds=280)
    assert cluster.core.job_view("first", cluster.now)["state"] == "CANCELLED"
    assert holders(cluster) == [], "it has the GPUs itself"


def test_a_job_with_a_live_controller_is_idle_or_working() -> None:
    cluster = waiting()
    cluster.submit("o", "first/actor", "optim_step")
    while not any(run.operation == "o" for run in cluster.runs):
        cluster.execute(cluster.runs[0])
    beat(cluster, "first", "second", seconds=50)
    assert [(row["condition"], row["idle_s"]) for row in holders(cluster)] == [("working", None)]
    cluster.execute(cluster.runs[0])
    beat(cluster, "first", "second", seconds=120)
    (row,) = holders(cluster)
    assert (row["condition"], row["idle_s"], row["cancelled_in_s"]) == ("idle", 120, None)


def test_a_tenant_does_not_see_who_owns_other_jobs() -> None:
    (row,) = holders(waiting(), sees_all=False)
    assert (row["job"], row["tenant"], row["name"], row["gpus"]) == (None, None, None, 2)
    own = FakeCluster(policy="isolated")
    own.start_node(2)
    submit(own, "first")
    submit(own, "second")
    assert holders(own, sees_all=False)[0]["job"] == "first"


def test_abandoned_jobs_come_first() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(6)
    for job in ("busy", "idle", "gone", "last"):
        submit(cluster, job)
    for job in ("busy", "gone"):
        cluster.submit(f"{job}-o", f"{job}/actor", "optim_step")
    beat(cluster, "busy", "idle", "last", seconds=70)
    found = [(row["job"], row["condition"]) for row in holders(cluster, "last")]
    assert found == [("gone", "detached"), ("idle", "idle"), ("busy", "working")]


def test_only_suitable_gpus_are_listed() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.join_node(2, "fast", node_type="fast")
    cluster.start_node(2)
    submit(cluster, "fast", node_type="fast")
    submit(cluster, "any")
    submit(cluster, "wants-fast", node_type="fast")
    assert [row["job"] for row in holders(cluster, "wants-fast")] == ["fast"]
    assert holders(cluster, "any") == [], "it has what it wants"


def test_for_a_job_over_quota_the_jobs_of_its_tenant_are_listed() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(6)
    for tenant in ("t", "u"):
        cluster.send(ev.TenantCreated(tenant=tenant, key_digest=tenant))
    unbounded = {"weight": 1.0, "gpus_max": None, "gpu_seconds_max": None}
    cluster.send(ev.TenantConfigured(tenant="t", jobs_max=1, **unbounded))
    submit(cluster, "other", tenant="u")
    submit(cluster, "first")
    submit(cluster, "second")
    assert [row["job"] for row in holders(cluster, sees_all=False)] == ["first"]
