"""A deployment that ends before its job."""

import pytest

from plexrl.errors import ConflictError, ControllerReplacedError, UnknownDeploymentError
from plexrl.ids import DeploymentId, JobId, TenantId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.views import operation_log, usage_view
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import ListOperations
from plexrl.wire import messages as cmd
from tests.scheduler.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    """A trainer of two GPUs and two rollouts of one, on a node of four."""
    made = FakeCluster()
    made.start_node(gpus=4)
    made.job("a")
    made.deploy("a/actor")
    made.deploy("a/r0", kind="rollout", workers=1)
    made.deploy("a/r1", kind="rollout", workers=1)
    made.settle()
    return made


def state(cluster: FakeCluster, name: str) -> str:
    return cluster.core.deployment_view(DeploymentId(name), cluster.now)["state"]


def test_its_workers_and_its_state_go_and_the_job_continues(cluster: FakeCluster) -> None:
    sent = cluster.end("a/r1")
    (stop,) = (each for each in sent if isinstance(each, cmd.StopWorkers))
    (release,) = (each for each in sent if isinstance(each, cmd.ReleaseState))
    assert (stop.deployment, release.deployment, release.nodes) == ("a/r1", "a/r1", ("n",))
    assert state(cluster, "a/r1") == "stopped"
    cluster.submit("a:step", "a/actor", "forward_backward")
    cluster.submit("a:generate", "a/r0", "generate")
    cluster.settle()
    assert {cluster.state_of(each) for each in ("a:step", "a:generate")} == {"finished"}
    view = cluster.core.job_view(JobId("a"), cluster.now)
    assert [each["deployment"] for each in view["deployments"]] == ["a/actor", "a/r0"]


def test_others_get_its_gpus(cluster: FakeCluster) -> None:
    cluster.job("b")
    cluster.deploy("b/r", kind="rollout", workers=1)
    cluster.settle()
    assert state(cluster, "b/r") == "waiting"
    cluster.end("a/r1")
    cluster.settle()
    assert state(cluster, "b/r") == "ready"


def test_what_it_has_not_done_fails_as_cancelled(cluster: FakeCluster) -> None:
    for count in range(3):
        cluster.submit(f"a:g{count}", "a/r1", "generate")
    running = [run.operation for run in cluster.runs]
    assert running
    cluster.submit("a:sync", "a/r1", "sync_weights", source="a/actor")
    cluster.end("a/r1")
    for name in ("a:g0", "a:g1", "a:g2", "a:sync"):
        assert cluster.error_of(name)["code"] == "operation_cancelled"
    # The report of a run that it had begun comes too late.
    cluster.settle()
    assert cluster.state_of(running[0]) == "cancelled"


def test_a_repeated_end_and_a_repeated_creation_change_nothing(cluster: FakeCluster) -> None:
    cluster.end("a/r1")
    assert cluster.end("a/r1") == []
    cluster.deploy("a/r1", kind="rollout", workers=1)
    cluster.settle()
    assert state(cluster, "a/r1") == "stopped"
    assert not cluster.launches


def test_it_takes_no_operations(cluster: FakeCluster) -> None:
    cluster.end("a/r1")
    with pytest.raises(UnknownDeploymentError, match="'a/r1' was ended"):
        cluster.submit("a:late", "a/r1", "generate")
    with pytest.raises(UnknownDeploymentError, match="'a/r1' was ended"):
        cluster.relayout("a/r1", "{other}")


def test_a_trainer_is_not_ended_while_a_rollout_needs_its_weights(cluster: FakeCluster) -> None:
    cluster.submit("a:sync", "a/r0", "sync_weights", source="a/actor")
    with pytest.raises(ConflictError, match="'a/r0' needs the weights of 'a/actor'"):
        cluster.end("a/actor")
    cluster.settle()
    assert cluster.state_of("a:sync") == "finished"
    cluster.end("a/r0")
    cluster.end("a/actor")
    assert state(cluster, "a/actor") == "stopped"


def test_a_former_controller_ends_nothing(cluster: FakeCluster) -> None:
    cluster.send(ev.ControllerAttached(job=JobId("a"), controller="new"))
    with pytest.raises(ControllerReplacedError):
        cluster.send(ev.DeploymentEnded(deployment=DeploymentId("a/r1"), controller="old"))
    assert state(cluster, "a/r1") == "ready"


def test_the_rest_of_a_waiting_gang_needs_no_successor() -> None:
    cluster = FakeCluster()
    cluster.start_node(gpus=3)
    cluster.job("b")
    cluster.deploy("b/r", kind="rollout", workers=2)
    cluster.job("a", gang=2)
    cluster.deploy("a/r0", kind="rollout", workers=1)
    cluster.deploy("a/r1", kind="rollout", workers=1)
    assert state(cluster, "a/r0") == "waiting"
    cluster.end("a/r1")
    assert state(cluster, "a/r0") == "launching"


def test_a_job_is_admitted_when_what_it_waited_for_is_ended() -> None:
    cluster = FakeCluster()
    cluster.start_node(gpus=3)
    cluster.job("b")
    cluster.deploy("b/r", kind="rollout", workers=2)
    cluster.job("a")
    cluster.deploy("a/r", kind="rollout", workers=2)
    cluster.deploy("a/actor", workers=1)
    assert state(cluster, "a/actor") == "launching"
    assert cluster.core.job_view(JobId("a"), cluster.now)["state"] == "QUEUED"
    cluster.end("a/r")
    assert cluster.core.job_view(JobId("a"), cluster.now)["state"] == "ADMITTED"


def test_it_is_counted_until_its_end_and_its_operations_can_be_looked_up(
    cluster: FakeCluster,
) -> None:
    cluster.send(ev.TenantCreated(tenant=TenantId("t"), key_digest="t"))
    cluster.submit("a:g", "a/r1", "generate")
    cluster.settle()
    assert [each["gpus_held"] for each in cluster.core.list_tenants(cluster.now)] == [4]
    cluster.end("a/r1")
    assert [each["gpus_held"] for each in cluster.core.list_tenants(cluster.now)] == [3]
    found = operation_log(cluster.core.cluster, None, ListOperations(job=JobId("a")), cluster.now)
    assert "a:g" in {each["operation"] for each in found}
    assert "generate" in {each["kind"] for each in usage_view(cluster.core.cluster.state, None)}


def test_it_stays_ended_after_a_restart_and_goes_with_its_job(cluster: FakeCluster) -> None:
    cluster.end("a/r1")
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    restored.check_invariants()
    assert restored.deployment_view(DeploymentId("a/r1"), cluster.now)["state"] == "stopped"
    replayed = SchedulerCore(cluster.config)
    for event, at in cluster.journal:
        replayed.handle(event, at)
    assert replayed.dump() == cluster.core.dump()


def test_a_dropped_job_takes_its_ended_deployments_with_it() -> None:
    cluster = FakeCluster(ended_jobs=1)
    cluster.start_node(gpus=2)
    for job in "ab":
        cluster.job(job)
        cluster.deploy(f"{job}/r", kind="rollout", workers=1)
        cluster.settle()
        cluster.end(f"{job}/r")
        cluster.send(ev.JobFinished(job=JobId(job), outcome="completed"))
    with pytest.raises(UnknownDeploymentError, match="there is no deployment"):
        state(cluster, "a/r")
    assert state(cluster, "b/r") == "stopped"
