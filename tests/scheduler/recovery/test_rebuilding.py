"""State that is lost with its node is recomputed from the operations that led to it."""

from typing import Any

import pytest

from plexrl.errors import (
    CorruptStateError,
    ExecutionError,
    InvalidRequestError,
    PlexRLError,
    StateLostError,
)
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import Run
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster, config
from tests.scheduler.recovery.test_relocation import cluster_of, drain, explained, with_jobs

GONE_S = 121.0
"""Beyond `node_replace_s`."""


def trained(steps: int = 3, nodes: int = 2, **changes: object) -> FakeCluster:
    """`a` has trained on n0, which has its only version; every step made a version."""
    cluster = cluster_of(nodes, **{"snapshot_operations": 1, "rebuild_operations": 10, **changes})
    with_jobs(cluster, "a")
    train(cluster, *range(steps))
    assert durable_seq(cluster) > 0
    return cluster


def train(cluster: FakeCluster, *indices: int) -> None:
    for index in indices:
        cluster.submit(f"a:{index}", "a/actor", "forward_backward")
    cluster.settle()


def durable_seq(cluster: FakeCluster) -> int:
    return int(cluster.core.deployment_view("a/actor", cluster.now)["durable_seq"])


def job(cluster: FakeCluster) -> dict[str, object]:
    (found,) = [j for j in cluster.core.list_jobs(None, cluster.now) if j["job"] == "a"]
    return dict(found)


def refuse(cluster: FakeCluster, run: Run, error: PlexRLError) -> None:
    cluster.runs.remove(run)
    cluster.send(
        ev.OperationFailed(
            operation=run.operation,
            token=run.token,
            error=error.to_wire(),
            state_intact=False,
        )
    )


def test_a_version_lost_with_its_node_is_recomputed_elsewhere() -> None:
    cluster = trained()
    cluster.submit("a:3", "a/actor", "forward_backward")
    cluster.lose_node("n0")
    cluster.pass_time(GONE_S)
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n1"]
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]
    assert cluster.state_of("a:3") == "finished"


def test_a_recomputed_version_can_be_lost_and_recomputed_again() -> None:
    cluster = trained(nodes=3)
    for count, node in enumerate(("n0", "n1")):
        assert explained(cluster, "a")["nodes"] == [node]
        cluster.lose_node(node)
        cluster.pass_time(GONE_S)
        train(cluster, 3 + count)
    assert explained(cluster, "a")["nodes"] == ["n2"]
    assert cluster.wpgs["a/actor"].device == [f"a:{index}" for index in range(5)]


def test_a_version_on_a_node_that_returns_in_time_is_loaded() -> None:
    cluster = trained()
    cluster.lose_node("n0")
    cluster.pass_time(GONE_S - 10.0)
    cluster.join_node(node="n0")
    train(cluster, 3)
    assert explained(cluster, "a")["nodes"] == ["n0"]
    assert durable_seq(cluster) > 0


def test_a_lost_node_is_awaited_as_long_as_the_replay_takes() -> None:
    cluster = cluster_of(2, snapshot_operations=1, rebuild_operations=10)
    cluster.compute_s = 200.0
    with_jobs(cluster, "a")
    train(cluster, 0, 1, 2)
    cluster.submit("a:3", "a/actor", "forward_backward")
    cluster.lose_node("n0")
    # The version on n0 has all steps but those that the log repeats anyway: 600 s in all.
    cluster.pass_time(590.0)
    assert explained(cluster, "a")["nodes"] == ["n0"]
    assert cluster.state_of("a:3") != "finished"
    cluster.pass_time(11.0)
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n1"]
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]


@pytest.mark.parametrize("how", ["drained", "not to return"])
def test_a_node_that_will_not_come_back_is_not_awaited(how: str) -> None:
    cluster = cluster_of(
        2, snapshot_operations=1, rebuild_operations=10, lost_nodes_return=how == "drained"
    )
    cluster.compute_s = 200.0
    with_jobs(cluster, "a")
    train(cluster, 0, 1, 2)
    cluster.lose_node("n0")
    if how == "drained":
        drain(cluster, "n0")
    else:
        cluster.pass_time(GONE_S)
    train(cluster, 3)
    assert explained(cluster, "a")["nodes"] == ["n1"]
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]


def test_a_restarted_scheduler_recomputes_too() -> None:
    cluster = trained()
    cluster.lose_node("n0")
    del cluster.nodes["n0"]
    cluster.restart_scheduler(restored=True)
    cluster.pass_time(GONE_S)
    train(cluster, 3)
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]


def test_what_a_loaded_checkpoint_replaced_is_not_repeated() -> None:
    cluster = trained(rebuild_operations=3)
    cluster.submit("load", "a/actor", "load_checkpoint")
    train(cluster, 3, 4)
    cluster.lose_node("n0")
    cluster.pass_time(GONE_S)
    train(cluster, 5)
    assert cluster.wpgs["a/actor"].device == ["load", "a:3", "a:4", "a:5"]


def test_an_incomplete_copy_from_a_lost_node_is_recomputed() -> None:
    cluster = trained()
    drain(cluster, "n0")
    while not cluster.migrations:
        cluster.execute(cluster.runs[0])
    cluster.lose_node("n0")
    cluster.migrations.clear()
    cluster.pass_time(GONE_S)
    train(cluster, 3)
    assert explained(cluster, "a")["nodes"] == ["n1"]
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]


def offloaded_after(steps: int, **changes: object) -> FakeCluster:
    """`a` has trained, with a version after every step, and has been offloaded for `b`."""
    cluster = FakeCluster(**{"snapshot_operations": 1, "rebuild_operations": 4, **changes})
    cluster.start_node(gpus=2)
    with_jobs(cluster, "a", "b")
    train(cluster, *range(steps))
    cluster.submit("b:0", "b/actor", "forward_backward")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device is None
    return cluster


def load_of_a(cluster: FakeCluster) -> Any:
    """The load of `a`, once it runs."""
    while True:
        for run in cluster.runs:
            if (run.deployment, run.kind) == ("a/actor", OperationKind.LOAD):
                return run
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            assert cluster.timer_at is not None, "nobody loads it"
            cluster.pass_time(cluster.timer_at - cluster.now)


def damage(cluster: FakeCluster, error: PlexRLError) -> int:
    """The running load finds its version damaged; returns the version."""
    run = load_of_a(cluster)
    cluster.wpgs["a/actor"].versions.pop(run.seq, None)
    refuse(cluster, run, error)
    return int(run.seq)


@pytest.mark.parametrize("error", [CorruptStateError("a block"), StateLostError("no file")])
@pytest.mark.parametrize("steps", [3, 9])
def test_a_damaged_version_is_recomputed_from_an_earlier_one(
    error: PlexRLError, steps: int
) -> None:
    cluster = offloaded_after(steps)
    cluster.submit("a:last", "a/actor", "forward_backward")
    damaged = damage(cluster, error)
    assert damaged == steps
    earlier = load_of_a(cluster).seq
    assert 0 < earlier < damaged
    assert damaged - earlier <= 4, "no more is repeated than is kept"
    cluster.settle()
    done = [f"a:{index}" for index in range(steps)]
    assert cluster.wpgs["a/actor"].device == [*done, "a:last"]
    assert cluster.state_of("a:last") == "finished"
    assert job(cluster)["state"] != "FAILED"


def test_without_an_earlier_version_it_is_recomputed_from_the_initial_weights() -> None:
    cluster = offloaded_after(3)
    cluster.submit("a:3", "a/actor", "forward_backward")
    seqs = [damage(cluster, StateLostError("no file")) for _ in range(2)]
    assert seqs[1] < seqs[0]
    assert load_of_a(cluster).seq == 0
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]


def test_a_job_fails_when_neither_an_earlier_version_nor_the_start_is_left() -> None:
    cluster = offloaded_after(9)
    cluster.submit("a:9", "a/actor", "forward_backward")
    for _ in range(2):
        damage(cluster, StateLostError("no file"))
    assert job(cluster)["state"] == "FAILED"
    assert "cannot be loaded, nor recomputed" in str(job(cluster)["reason"])
    assert cluster.state_of("a:9") == "cancelled"


def test_damaged_versions_do_not_count_as_worker_failures() -> None:
    cluster = offloaded_after(3, launch_attempts=1)
    cluster.submit("a:3", "a/actor", "forward_backward")
    for _ in range(2):
        damage(cluster, StateLostError("no file"))
    cluster.settle()
    assert cluster.state_of("a:3") == "finished"


def test_a_restarted_scheduler_remembers_the_earlier_version() -> None:
    cluster = offloaded_after(9)
    cluster.restart_scheduler(restored=True)
    cluster.submit("a:9", "a/actor", "forward_backward")
    damage(cluster, CorruptStateError("a block"))
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == [f"a:{index}" for index in range(10)]


def test_an_offload_of_lost_state_restarts_the_workers() -> None:
    cluster = offloaded_after(3)
    train(cluster, 3)
    cluster.submit("b:1", "b/actor", "forward_backward")
    while not cluster.runs:
        assert cluster.timer_at is not None
        cluster.pass_time(cluster.timer_at - cluster.now)
    (offload,) = cluster.runs
    assert (offload.deployment, offload.kind) == ("a/actor", OperationKind.OFFLOAD)
    refuse(cluster, offload, StateLostError("the last pull was cut"))
    train(cluster, 4)
    assert cluster.wpgs["a/actor"].device == [f"a:{index}" for index in range(5)]


@pytest.mark.parametrize("rebuild_operations", [0, 2])
def test_beyond_the_bound_the_node_is_awaited_or_the_job_ends(rebuild_operations: int) -> None:
    steps = 2 * rebuild_operations + 2
    waiting = trained(steps, rebuild_operations=rebuild_operations)
    waiting.lose_node("n0")
    waiting.pass_time(1000.0)
    assert not waiting.launches
    assert job(waiting)["state"] not in ("FAILED", "COMPLETED")
    ending = trained(steps, rebuild_operations=rebuild_operations, lost_nodes_return=False)
    ending.submit("a:last", "a/actor", "forward_backward")
    ending.lose_node("n0")
    assert job(ending)["state"] != "FAILED"
    ending.pass_time(GONE_S)
    assert job(ending)["state"] == "FAILED"
    assert "n0" in str(job(ending)["reason"])
    assert "checkpoint" in str(job(ending)["reason"])
    assert ending.state_of("a:last") == "cancelled"


def synced(*, shares: bool = False, **changes: object) -> FakeCluster:
    """A trainer on n0 whose rollout there has pulled its weights; n1 is empty."""
    cluster = cluster_of(2, rebuild_operations=10, **changes)
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout", workers=1, shares=shares)
    cluster.submit("a:0", "a/actor", "optim_step")
    cluster.submit("sync", "a/rollout", "sync_weights", source="a/actor")
    cluster.settle()
    return cluster


def test_a_rollout_whose_trainer_lost_what_it_published_has_it_publish_again() -> None:
    cluster = synced()
    cluster.kill("a/rollout")
    cluster.submit("draw", "a/rollout", "generate")
    cluster.launch(cluster.launches[0])
    cluster.execute(cluster.runs[0])
    (replayed,) = cluster.runs
    assert replayed.replay
    refuse(cluster, replayed, StateLostError("the version is gone"))
    (publish,) = cluster.runs
    assert (publish.deployment, publish.kind.value) == ("a/actor", "publish")
    cluster.execute(publish)
    (again,) = cluster.runs
    assert (again.operation, again.replay) == ("sync", True)
    assert again.token > replayed.token, "workers answer a run that they know as before"
    assert again.source_seq == publish.seq
    cluster.settle()
    assert cluster.wpgs["a/rollout"].device == ["sync"]
    assert cluster.state_of("draw") == "finished"


def test_a_generation_reports_the_step_of_the_last_published_weights() -> None:
    cluster = synced()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.execute(cluster.runs[0], trainer_step=4)
    cluster.submit("again", "a/rollout", "sync_weights", source="a/actor")
    cluster.execute(cluster.runs[0], trainer_step=4)
    (sync,) = cluster.runs
    assert (sync.operation, sync.trainer_step) == ("again", 4)
    cluster.execute(sync, trainer_step=4)
    cluster.kill("a/rollout")
    cluster.submit("draw", "a/rollout", "generate")
    cluster.launch(cluster.launches[0])
    cluster.execute(cluster.runs[0])
    refuse(cluster, cluster.runs[0], StateLostError("the version is gone"))
    cluster.execute(cluster.runs[0], trainer_step=6)
    (replayed,) = cluster.runs
    assert (replayed.replay, replayed.trainer_step) == (True, 6), "its trainer's present weights"
    cluster.execute(replayed, trainer_step=6)
    (draw,) = cluster.runs
    assert (draw.operation, draw.trainer_step) == ("draw", 6)
    cluster.restart_scheduler(restored=True)
    assert cluster.core.deployment_view("a/rollout", cluster.now)["trainer_step"] == 6


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_repeated_sync_is_retried_when_its_new_publish_fails(
    is_cancelled: bool,
) -> None:
    cluster = synced()
    cluster.kill("a/rollout")
    cluster.submit("draw", "a/rollout", "generate")
    cluster.launch(cluster.launches[0])
    cluster.execute(cluster.runs[0])
    if is_cancelled:
        # Something that lasts keeps the trainer, so that the publish waits behind it.
        cluster.submit("work", "a/actor", "forward_backward")
        while cluster.runs[0].deployment == "a/actor" and cluster.runs[0].operation != "work":
            cluster.execute(cluster.runs[0])
    (replayed,) = [run for run in cluster.runs if run.replay]
    refuse(cluster, replayed, StateLostError("the version is gone"))
    if is_cancelled:
        cluster.send(ev.OperationCancelled(operation="sync#publish1"))
    else:
        (publish,) = cluster.runs
        cluster.runs.remove(publish)
        cluster.send(
            ev.OperationFailed(
                operation=publish.operation,
                token=publish.token,
                error=ExecutionError("no weights").to_wire(),
                state_intact=True,
            )
        )
    assert [run.operation for run in cluster.runs if run.replay] == ["sync"]
    cluster.settle()
    assert cluster.wpgs["a/rollout"].device == ["sync"]
    assert cluster.state_of("draw") == "finished"


def test_weights_that_repeatedly_cannot_be_pulled_end_the_job() -> None:
    cluster = synced(launch_attempts=2)
    cluster.kill("a/rollout")
    cluster.submit("draw", "a/rollout", "generate")
    for _ in range(20):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.runs and cluster.runs[0].operation == "sync":
            refuse(cluster, cluster.runs[0], StateLostError("the version is gone"))
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
    assert job(cluster)["state"] == "FAILED"


def test_an_error_that_a_publish_cannot_repair_restarts_the_rollout() -> None:
    cluster = synced()
    cluster.kill("a/rollout")
    cluster.submit("draw", "a/rollout", "generate")
    cluster.launch(cluster.launches[0])
    cluster.execute(cluster.runs[0])
    refuse(cluster, cluster.runs[0], ExecutionError("it broke"))
    assert [launch.deployment for launch in cluster.launches] == ["a/rollout"]
    cluster.settle()
    assert cluster.wpgs["a/rollout"].device == ["sync"]


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="rebuild_operations"):
        config(rebuild_operations=-1)


def test_a_copy_of_a_damaged_version_is_not_awaited() -> None:
    cluster = trained()
    drain(cluster, "n0")
    while not cluster.migrations:
        cluster.execute(cluster.runs[0])
    for _ in range(2):
        (migration,) = cluster.migrations
        cluster.migrations.clear()
        cluster.send(
            ev.StateMigrated(
                deployment="a/actor",
                node=migration.nodes[0],
                seq=migration.seq,
                error="a block is damaged",
                code="corrupt_state",
            )
        )
    assert not cluster.migrations, "neither version can be copied"
    train(cluster, 3)
    assert explained(cluster, "a")["nodes"] == ["n1"]
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", "a:3"]


def test_a_rollout_that_shares_a_group_is_restarted_and_waits_for_no_publish() -> None:
    cluster = synced(shares=True)
    assert cluster.core._context.state.deployment("a/rollout").spec.shares
    cluster.kill("a/rollout")
    cluster.submit("draw", "a/rollout", "generate")
    for _ in range(20):
        if cluster.runs and cluster.runs[0].operation == "sync":
            break
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        else:
            cluster.execute(cluster.runs[0])
    refuse(cluster, cluster.runs[0], StateLostError("the version is gone"))
    assert [launch.deployment for launch in cluster.launches] == ["a/rollout"]
    assert not any(run.kind.value == "publish" for run in cluster.runs)
