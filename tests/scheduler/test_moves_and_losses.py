"""Moves that find no room or wait for others, and nodes that die or come back smaller."""

import json

from plexrl.errors import StateTierFullError
from plexrl.scheduler import events as ev
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.test_relocation import cluster_of, drain, explained, moves, with_jobs


def refuse(cluster: FakeCluster, kind: str) -> None:
    """The one run in flight, a move, finds no room."""
    (run,) = cluster.runs
    assert run.kind.value == kind
    cluster.runs.clear()
    cluster.send(
        ev.OperationFailed(
            operation=run.operation,
            token=run.token,
            error_json=json.dumps(StateTierFullError("no room").to_wire()),
            state_intact=True,
        )
    )


def test_a_job_whose_move_finds_no_room_works_on_and_is_moved_later() -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a")
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.settle()
    drain(cluster, "n0")
    refuse(cluster, "offload")
    assert not cluster.runs, "it is not tried again at once"
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.execute(cluster.runs[0])
    assert cluster.state_of("a:1") == "finished"
    cluster.pass_time(29.0)
    assert not cluster.runs
    cluster.pass_time(2.0)
    refuse(cluster, "offload")
    cluster.pass_time(31.0)
    cluster.settle()
    assert (explained(cluster, "a")["nodes"], moves(cluster, "a")) == (["n1"], 1)


def test_a_load_that_finds_no_room_calls_the_move_off_too() -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a")
    cluster.submit("a:0", "a/actor", "forward_backward")
    drain(cluster, "n0")
    refuse(cluster, "load")
    cluster.pass_time(3.0)
    cluster.execute(cluster.runs[0])
    cluster.execute(cluster.runs[0])
    assert cluster.state_of("a:0") == "finished"
    cluster.pass_time(31.0)
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n1"]


def test_a_trainer_does_not_wait_for_a_rollout_that_has_no_gpus() -> None:
    cluster = cluster_of(1)
    cluster.join_node(4, "n1")
    with_jobs(cluster, "a", "b")
    cluster.deploy("a/rollout", "rollout", workers=4)
    cluster.submit("a:0", "a/actor", "optim_step")
    cluster.submit("a:1", "a/rollout", "sync_weights", source="a/actor")
    cluster.settle()
    assert cluster.state_of("a:1") == "pending"
    drain(cluster, "n0")
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n1"]


def test_a_trainer_works_on_while_its_weights_are_pulled() -> None:
    cluster = cluster_of(3)
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout")
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/rollout", "generate")
    cluster.submit("a:3", "a/rollout", "sync_weights", source="a/actor")
    for _ in range(3):
        cluster.execute(next(run for run in cluster.runs if run.deployment == "a/actor"))
    drain(cluster, "n0")
    cluster.submit("a:4", "a/actor", "forward_backward")
    (run,) = [run for run in cluster.runs if run.deployment == "a/actor"]
    assert run.operation == "a:4"
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n2"]
