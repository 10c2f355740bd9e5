"""Reports that arrive after the cluster has changed."""

import pytest
from msgspec.structs import replace

from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.core.test_core import with_jobs
from tests.scheduler.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.start_node()
    return made


def test_no_two_groups_are_given_the_same_token() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node()
    with_jobs(cluster, "a", "b")
    given: dict[int, set[str]] = {}
    for index in range(4):
        for job in ("a", "b"):
            # A restarted worker gets the lock under a new token.
            cluster.kill(f"{job}/actor")
            cluster.submit(f"{job}:{index}", f"{job}/actor", "barrier")
            cluster.settle()
            for group in cluster.core.list_groups(cluster.now):
                given.setdefault(group["token"], set()).add(group["group"])
    assert len(given) > 2
    assert all(len(groups) == 1 for groups in given.values()), given


def test_reports_of_ranks_on_a_lost_node_come_too_late(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    cluster.kill("a/actor")
    launch = cluster.launches[0]
    ready = [
        ev.WorkerReady(
            deployment="a/actor", rank=rank, incarnation=launch.incarnation, address=str(rank)
        )
        for rank in range(2)
    ]
    cluster.send(ready[0])
    cluster.send(ev.NodeLost(node="n"))
    for report in (ready[1], ready[0]):
        cluster.send(report)
        assert cluster.core.deployment_view("a/actor", cluster.now)["state"] == "recovering"
    workers = tuple(
        ev.WorkerSeen(
            deployment="a/actor", rank=rank, incarnation=launch.incarnation, address=str(rank)
        )
        for rank in range(2)
    )
    cluster.send(replace(cluster.nodes["n"], workers=workers))
    assert cluster.core.deployment_view("a/actor", cluster.now)["state"] == "ready"


def test_a_report_of_a_rank_that_the_deployment_does_not_have_is_ignored(
    cluster: FakeCluster,
) -> None:
    with_jobs(cluster, "a")
    cluster.kill("a/actor")
    launch = cluster.launches[0]
    for rank in (0, 2, -1):
        cluster.send(
            ev.WorkerReady(
                deployment="a/actor", rank=rank, incarnation=launch.incarnation, address="x"
            )
        )
    assert cluster.core.deployment_view("a/actor", cluster.now)["state"] == "recovering"


def test_the_id_of_a_sync_that_is_forgotten_may_be_used_again_while_its_publish_waits() -> None:
    cluster = FakeCluster(history=1)
    cluster.start_node()
    with_jobs(cluster, "a")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("busy", "a/actor", "forward_backward")
    cluster.submit("sync", "a/rollout", "sync_weights", "a/actor")
    cluster.send(ev.OperationCancelled(operation="sync"))
    cluster.submit("other", "a/rollout", "barrier")
    while runs := [run for run in cluster.runs if run.deployment == "a/rollout"]:
        cluster.execute(runs[0])
    cluster.submit("sync", "a/rollout", "sync_weights", "a/actor")
    cluster.settle()
    assert cluster.wpgs["a/rollout"].device == ["sync"]
    cluster.restart_scheduler()
    cluster.settle()


def test_a_report_of_a_run_on_the_group_of_before_is_not_taken_for_one_of_its_repetition() -> None:
    cluster = FakeCluster(node_replace_s=0.0, rebuild_operations=10)
    for node in ("n1", "n2"):
        cluster.join_node(2, node=node)
    cluster.join_router()
    with_jobs(cluster, "a")
    cluster.submit("step", "a/actor", "optim_step")
    while cluster.runs[0].operation != "step":
        cluster.execute(cluster.runs[0])
    run = cluster.runs[0]
    late = ev.OperationFinished(operation="step", token=run.token, compute_s=0.1)
    cluster.execute(run)
    cluster.lose_node("n1")
    cluster.submit("next", "a/actor", "forward")
    cluster.launch(cluster.launches[0])
    while cluster.runs[0].operation != "step":
        cluster.execute(cluster.runs[0])
    assert cluster.runs[0].replay
    cluster.send(late)
    assert [run.operation for run in cluster.runs] == ["step"], "the repetition is not over"


def test_a_launch_that_waits_for_room_is_not_made_sooner_by_its_node(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    full = ev.WorkerExited(
        deployment="a/actor", rank=0, incarnation=1, reason="no room", code="storage_full"
    )
    cluster.send(full)
    cluster.join_node()
    assert not cluster.launches, "what it would launch was stopped"
    cluster.send(full)
    cluster.pass_time(60.0)
    assert [launch.incarnation for launch in cluster.launches] == [2]
    cluster.launch(cluster.launches[0])
    cluster.kill("a/actor")
    assert [launch.incarnation for launch in cluster.launches] == [3]
