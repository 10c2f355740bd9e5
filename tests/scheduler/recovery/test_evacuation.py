"""Moves without capacity or with dependencies, and nodes that are lost or return smaller."""

import pytest
from msgspec.structs import replace

from plexrl.errors import InvalidRequestError, LayoutError, PlexRLError, StateTierFullError
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import LaunchWorkers, ReleaseState, StopWorkers
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.recovery.test_relocation import cluster_of, drain, explained, moves, with_jobs


def refuse(cluster: FakeCluster, kind: str, error: PlexRLError | None = None) -> None:
    """The one run in flight, a move, fails with `error`, by default for lack of space."""
    (run,) = cluster.runs
    assert run.kind.value == kind
    cluster.runs.clear()
    cluster.send(
        ev.OperationFailed(
            operation=run.operation,
            token=run.token,
            error=(error or StateTierFullError("no room")).to_wire(),
            state_intact=True,
        )
    )


def test_a_job_whose_move_finds_no_capacity_continues_and_moves_later() -> None:
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


def test_a_load_without_capacity_cancels_the_move() -> None:
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


@pytest.mark.parametrize("refusal", [InvalidRequestError, LayoutError])
def test_a_load_that_no_worker_can_do_ends_the_job_with_the_reason(
    refusal: type[PlexRLError],
) -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a")
    cluster.submit("a:0", "a/actor", "forward_backward")
    refuse(cluster, "load", refusal("pip install it"))
    cluster.settle()
    view = cluster.core.job_view("a", cluster.now)
    assert view["state"] == "FAILED"
    assert view["reason"] == "'a/actor' cannot be built: pip install it"
    assert cluster.state_of("a:0") == "cancelled"
    assert "pip install it" in str(cluster.core.operation_view("a:0", cluster.now)["error"])


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


def test_a_trainer_continues_while_its_weights_are_pulled() -> None:
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


def trained(*, offloaded: bool = False, nodes: int = 2, **changes: object) -> FakeCluster:
    """`a` has trained two steps on n0; the other nodes are empty. `offloaded`: it has a durable
    version there."""
    cluster = cluster_of(nodes, **{"snapshot_operations": 1 if offloaded else 10, **changes})
    with_jobs(cluster, "a")
    for index in range(2):
        cluster.submit(f"a:{index}", "a/actor", "forward_backward")
    cluster.settle()
    assert bool(cluster.wpgs["a/actor"].versions) == offloaded
    return cluster


def reason_of(cluster: FakeCluster, operation: str) -> str:
    return cluster.explanation_of(operation)["reason"]


def test_a_wpg_with_a_complete_log_moves_when_its_node_stays_lost() -> None:
    cluster = trained()
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.lose_node("n0")
    assert "n0" in reason_of(cluster, "a:2")
    cluster.pass_time(119.0)
    assert not cluster.launches
    cluster.pass_time(2.0)
    assert {rank.node for rank in cluster.launches[0].ranks} == {"n1"}
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]
    cluster.join_node(node="n0")
    cluster.submit("a:3", "a/actor", "forward_backward")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]
    assert explained(cluster, "a")["nodes"] == ["n1"]


def test_a_node_that_returns_in_time_keeps_its_wpgs() -> None:
    cluster = trained()
    cluster.lose_node("n0")
    cluster.pass_time(100.0)
    cluster.join_node(node="n0")
    cluster.pass_time(100.0)
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n0"]
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]


@pytest.mark.parametrize("drained_first", [True, False])
def test_a_dead_node_that_is_drained_is_not_awaited(drained_first: bool) -> None:
    cluster = trained()
    cluster.join_node(node="n1")
    if drained_first:
        cluster.lose_node("n1")
        drain(cluster, "n0")
        cluster.lose_node("n0")
        assert explained(cluster, "a")["state"] == "waiting", "there is no room yet"
        cluster.join_node(node="n1")
    else:
        cluster.lose_node("n0")
        drain(cluster, "n0")
    assert {rank.node for rank in cluster.launches[-1].ranks} == {"n1"}


def test_without_capacity_it_queues_for_gpus_and_loses_nothing() -> None:
    cluster = trained(nodes=1)
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.lose_node("n0")
    cluster.pass_time(121.0)
    assert explained(cluster, "a")["state"] == "waiting"
    cluster.restart_scheduler(restored=True)
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]


def test_the_node_with_the_only_durable_version_is_awaited() -> None:
    cluster = trained(offloaded=True, rebuild_operations=0)
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.lose_node("n0")
    cluster.pass_time(1000.0)
    assert not cluster.launches
    assert reason_of(cluster, "a:2").startswith("it waits for n0")
    cluster.join_node(node="n0")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]
    assert explained(cluster, "a")["nodes"] == ["n0"]


def test_a_lost_node_with_a_part_of_the_version_is_awaited() -> None:
    cluster = cluster_of(2, snapshot_operations=1, rebuild_operations=0)
    cluster.job("a")
    cluster.deploy("a/actor", workers=4)
    for index in range(2):
        cluster.submit(f"a:{index}", "a/actor", "forward_backward")
    cluster.settle()
    cluster.join_node(4, "n2")
    cluster.lose_node("n0")
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.pass_time(121.0)
    assert not cluster.migrations
    assert reason_of(cluster, "a:2").startswith("it waits for n0")
    cluster.join_node(node="n0")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]


def test_parts_of_a_version_follow_to_a_node_with_other_parts() -> None:
    cluster = cluster_of(1, policy="isolated")
    cluster.join_node(6, "n1")
    for job in ("b", "a"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=4)
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n0", "n1"]
    cluster.send(ev.JobFinished(job="b", outcome="completed"))
    drain(cluster, "n0")
    cluster.execute(cluster.runs[0])
    (migration,) = cluster.migrations
    assert (migration.nodes, migration.sources) == (("n1",), ("sm:n0", "sm:n1"))
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n1"]


def test_a_migration_whose_target_dies_goes_to_another_node() -> None:
    cluster = trained(nodes=3)
    drain(cluster, "n0")
    cluster.execute(cluster.runs[0])
    (migration,) = cluster.migrations
    (target,) = migration.nodes
    cluster.lose_node(target)
    cluster.submit("a:2", "a/actor", "forward_backward")
    cluster.pass_time(121.0)
    (other,) = {"n1", "n2"} - {target}
    assert [each.nodes for each in cluster.migrations] == [(other,)]
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]
    assert explained(cluster, "a")["nodes"] == [other]
    commands = cluster.send(replace(cluster.nodes[target], states=("a/actor",)))
    assert ReleaseState(deployment="a/actor", nodes=(target,)) in commands


def test_workers_of_a_written_off_node_are_stopped_when_it_returns() -> None:
    cluster = trained()
    incarnation = cluster.wpgs["a/actor"].incarnation
    cluster.send(ev.NodeLost(node="n0"))
    cluster.pass_time(121.0)
    stale = tuple(
        ev.WorkerSeen(deployment="a/actor", rank=rank, incarnation=incarnation, address="old")
        for rank in range(2)
    )
    commands = cluster.send(replace(cluster.nodes["n0"], workers=stale))
    stop = StopWorkers(deployment="a/actor", incarnation=incarnation, nodes=("n0",))
    assert commands.count(stop) == 2
    assert not any(isinstance(each, LaunchWorkers) for each in commands)


@pytest.mark.parametrize("offloaded", [True, False])
@pytest.mark.parametrize("was_lost", [True, False])
def test_nothing_starts_on_gpus_that_a_node_no_longer_has(offloaded: bool, was_lost: bool) -> None:
    cluster = trained(offloaded=offloaded)
    if was_lost:
        cluster.lose_node("n0")
    cluster.nodes["n0"] = replace(cluster.nodes["n0"], gpus=1)
    cluster.join_node(node="n0")
    cluster.submit("a:2", "a/actor", "forward_backward")
    assert all(rank.node == "n1" for launch in cluster.launches for rank in launch.ranks)
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]
    assert explained(cluster, "a")["nodes"] == ["n1"]


def test_a_smaller_node_is_not_over_committed() -> None:
    cluster = cluster_of(1, gpus=4, policy="isolated")
    with_jobs(cluster, "a", "b")
    cluster.lose_node("n0")
    cluster.nodes["n0"] = replace(cluster.nodes["n0"], gpus=2)
    cluster.join_node(node="n0")
    cluster.settle()
    states = sorted(str(explained(cluster, job)["state"]) for job in "ab")
    assert states == ["ready", "waiting"]
    (node,) = cluster.core.list_nodes()
    assert (node["gpus"], node["gpus_reserved"]) == (2, 2)
