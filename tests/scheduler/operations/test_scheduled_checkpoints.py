"""A train deployment with a schedule saves checkpoints of itself, of exactly its steps' weights."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import (
    ConflictError,
    OverloadedError,
    PlexRLError,
    QuotaExceededError,
    StorageFullError,
)
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.operation import error_view
from plexrl.wire.operations import CheckpointSchedule
from tests.scheduler.fake_cluster import FakeCluster


def trainer(schedule: CheckpointSchedule | None) -> FakeCluster:
    cluster = FakeCluster()
    cluster.start_node(gpus=8)
    cluster.job("a", halts_on_failure=True)
    cluster.deploy("a/actor", checkpoints=schedule)
    return cluster


def run_all(cluster: FakeCluster, first_step: int = 1) -> list[Any]:
    """Execute all runs; returns those that users or the schedule wanted, in their order."""
    done, step = [], first_step
    while cluster.launches or cluster.runs:
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        if not cluster.runs:
            break
        run = cluster.runs[0]
        is_step = run.kind.value == "optim_step"
        cluster.execute(run, trainer_step=step if is_step else None)
        step += is_step
        if run.kind.value not in ("load", "offload", "snapshot"):
            done.append(run)
    return done


def fail_the_checkpoint(cluster: FakeCluster, error: PlexRLError) -> None:
    """Execute what comes before the first checkpoint, which fails."""
    while not any(run.kind.value == "save_checkpoint" for run in cluster.runs):
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        cluster.execute(cluster.runs[0], trainer_step=1)
    save = cluster.runs.pop()
    cluster.send(
        ev.OperationFailed(
            operation=save.operation,
            token=save.token,
            error=error_view(error),
            state_intact=True,
        )
    )


@given(every=st.integers(1, 4), steps=st.integers(0, 9))
def test_every_so_many_steps_are_followed_by_a_checkpoint_of_their_weights(
    every: int, steps: int
) -> None:
    cluster = trainer(CheckpointSchedule(every=every, keep_last=2))
    for step in range(1, steps + 1):
        cluster.now += 1.0
        cluster.submit(f"a:f{step}", "a/actor", "forward_backward")
        cluster.submit(f"a:s{step}", "a/actor", "optim_step")
    expected: list[str] = []
    for step in range(1, steps + 1):
        expected += [f"a:f{step}", f"a:s{step}"]
        if step % every == 0:
            expected.append(f"actor-step-{step}")
    done = run_all(cluster)
    saves = [run for run in done if run.kind.value == "save_checkpoint"]
    assert [run.params.name if run in saves else str(run.operation) for run in done] == expected
    for run in saves:
        assert (run.params.keep_last, run.params.keep_prefix) == (2, "actor-step-")
        assert run.params.overwrite, "after a step back the same step is made again"
        assert run.seq == 2 * run.params.step, "the version of that step, and no later one"


def test_without_a_schedule_nothing_is_saved() -> None:
    cluster = trainer(None)
    cluster.submit("a:s1", "a/actor", "optim_step")
    assert [run.kind.value for run in run_all(cluster)] == ["optim_step"]


def test_a_checkpoint_that_fails_is_reported_and_stops_nothing() -> None:
    cluster = trainer(CheckpointSchedule(every=1))
    cluster.submit("a:s1", "a/actor", "optim_step")
    cluster.submit("a:s2", "a/actor", "optim_step")
    error = QuotaExceededError("the tenant has 100 checkpoints: delete some")
    fail_the_checkpoint(cluster, error)
    assert [run.operation for run in cluster.runs] == ["a:s2"]
    failure = cluster.core.deployment_view("a/actor", cluster.now)["failure"]
    assert failure is not None
    assert error.message in failure["message"]


@given(
    every=st.integers(1, 3),
    faults=st.lists(
        st.sampled_from(("step", "run", "run", "run", "kill", "lose", "time")), max_size=40
    ),
)
def test_whatever_dies_each_due_step_has_a_checkpoint_of_its_own_version(
    every: int, faults: list[str]
) -> None:
    cluster = trainer(CheckpointSchedule(every=every))
    steps = 0
    saved: dict[int, int] = {}

    def execute(*, report: bool = True) -> None:
        run = cluster.runs[0]
        kind, name = run.kind.value, str(run.operation)
        step = int(name.removeprefix("a:s")) if kind == "optim_step" else None
        if kind == "save_checkpoint" and not cluster.is_out_of_date(run):
            saved[run.params.step] = run.seq
        cluster.execute(run, report=report, trainer_step=step)

    for fault in faults:
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        if fault == "step":
            steps += 1
            cluster.submit(f"a:f{steps}", "a/actor", "forward_backward")
            cluster.submit(f"a:s{steps}", "a/actor", "optim_step")
        elif fault == "kill":
            cluster.kill("a/actor")
        elif fault == "time":
            cluster.pass_time(10.0)
        elif cluster.runs:
            execute(report=fault == "run")
    for _ in range(1000):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.runs:
            execute()
        elif cluster.timer_at is not None and cluster.timer_at < cluster.now + 100.0:
            cluster.pass_time(cluster.timer_at - cluster.now)
    assert saved == {step: 2 * step for step in range(every, steps + 1, every)}


def test_one_that_meets_a_full_disk_is_retried_before_the_next_step() -> None:
    cluster = trainer(CheckpointSchedule(every=1))
    for step in (1, 2):
        cluster.now += 1.0
        cluster.submit(f"a:s{step}", "a/actor", "optim_step")
    fail_the_checkpoint(cluster, StorageFullError("the disk is full"))
    assert cluster.runs == [], "the second step would change the weights to save"
    cluster.pass_time(100.0)
    done = run_all(cluster, first_step=2)
    assert [run.kind.value for run in done] == ["save_checkpoint", "optim_step", "save_checkpoint"]
    assert [run.seq for run in done] == [1, 2, 2]


@pytest.mark.parametrize("end", ["job", "deployment"])
def test_what_is_ended_waits_for_the_checkpoint_of_its_last_step(end: str) -> None:
    cluster = trainer(CheckpointSchedule(every=1))
    cluster.submit("a:s1", "a/actor", "optim_step")

    def finish() -> None:
        if end == "job":
            cluster.send(ev.JobFinished(job="a", outcome="completed"))
        else:
            cluster.end("a/actor")

    while not any(run.kind.value == "save_checkpoint" for run in cluster.runs):
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        cluster.execute(cluster.runs[0], trainer_step=1)
    with pytest.raises(OverloadedError, match="not pinned yet"):
        finish()
    assert [run.kind.value for run in cluster.runs] == ["save_checkpoint"]
    cluster.execute(cluster.runs[0])
    finish()
    assert cluster.core.deployment_view("a/actor", cluster.now)["state"] == "stopped"


def test_a_cancelled_job_waits_for_no_checkpoint() -> None:
    cluster = trainer(CheckpointSchedule(every=1))
    cluster.submit("a:s1", "a/actor", "optim_step")
    while cluster.launches:
        cluster.launch(cluster.launches[0])
    while cluster.runs and cluster.runs[0].kind.value != "save_checkpoint":
        cluster.execute(cluster.runs[0], trainer_step=1)
    cluster.send(ev.JobFinished(job="a", outcome="cancelled"))
    assert cluster.core.job_view("a", cluster.now)["state"] == "CANCELLED"


def test_another_schedule_is_another_deployment() -> None:
    cluster = trainer(CheckpointSchedule(every=50))
    cluster.deploy("a/actor", checkpoints=CheckpointSchedule(every=50))
    with pytest.raises(ConflictError, match=r"checkpoint_every \(50, not 100\)"):
        cluster.deploy("a/actor", checkpoints=CheckpointSchedule(every=100))
