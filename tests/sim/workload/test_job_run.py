"""A job's cycles and its clock without other jobs, compared with hand calculations."""

from dataclasses import replace

import pytest

from plexrl.scheduler.state.demand.trace import Segment
from plexrl.sim.workload.cycles import CycleDistribution
from plexrl.sim.workload.job_run import AloneClock, JobRun, Step, cycles_of, demand_of
from plexrl.sim.workload.scenario import Behaviour
from plexrl.traces import TraceJob, TraceSegment
from plexrl.wire.operations import OperationKind

STEP, FORWARD = OperationKind.OPTIM_STEP, OperationKind.FORWARD

JOB = TraceJob(
    job_id="job",
    submit_s=0.0,
    gpus=8,
    cycles=3,
    period_s=100.0,
    segments=(
        TraceSegment(function="log_prob", offset_s=60.0, duration_s=10.0),
        TraceSegment(function="update", offset_s=70.0, duration_s=15.0),
        TraceSegment(function="sync", offset_s=90.0, duration_s=5.0),
    ),
)


def clock(
    staleness: int, snapshots_after: int = 64, snapshots_after_s: float = 600.0
) -> AloneClock:
    return AloneClock(
        staleness=staleness,
        controller_s=1.0,
        launch_s=30.0,
        rollout_load_s=0.0,
        load_s=4.0,
        snapshot_s=6.0,
        snapshots_after=snapshots_after,
        snapshots_after_s=snapshots_after_s,
    )


def run(detail: str, staleness: int = 0) -> JobRun:
    cycle_source = CycleDistribution(JOB, Behaviour(), 0, detail=detail)  # type: ignore[arg-type]
    return JobRun(JOB, "j1", cycle_source, staleness=staleness, state_bytes=1)


def test_a_serial_job_waits_for_each_rollout() -> None:
    alone, steps = clock(0), (Step(STEP, 20.0, 0.0),)
    took = [alone.cycle(50.0, steps, 1.0) for _ in range(3)]
    # Launch, rollout, load, step; then the controller, rollout, step.
    assert took == [30 + 50 + 4 + 20, 1 + 50 + 20, 1 + 50 + 20]
    assert alone.now == sum(took)


def test_a_rollout_that_runs_ahead_hides_the_training() -> None:
    alone, steps = clock(1), (Step(STEP, 20.0, 0.0),)
    took = [alone.cycle(50.0, steps, 1.0) for _ in range(4)]
    # Rollout 1 begins as rollout 0 ends, at 80, and ends at 130, when step 0 is long over (at 104).
    assert took[:2] == [104, 130 + 20 - 104]
    assert took[2:] == [50, 50]


def test_training_that_is_longer_than_rollouts_never_pauses_when_they_run_ahead() -> None:
    alone, steps = clock(1), (Step(STEP, 80.0, 0.0),)
    assert [alone.cycle(50.0, steps, 1.0) for _ in range(4)][1:] == [81, 81, 81]


def test_a_rollout_runs_no_further_ahead_than_its_staleness() -> None:
    """Rollouts that take no time still wait for the weights of the step before the last."""
    alone, steps = clock(1), (Step(STEP, 20.0, 0.0),)
    lengths = [0.0, 0.0, 100.0]
    took = [alone.cycle(rollout_s, steps, 1.0) for rollout_s in lengths]
    # Rollout 2 needs step 0, over at 54; so it begins at 55 and ends at 155.
    assert took == [54, 21, 155 + 20 - 75]


def test_gaps_snapshots_and_fast_nodes_count() -> None:
    alone = clock(0, snapshots_after=1)
    steps = (Step(FORWARD, 10.0, 0.0), Step(STEP, 20.0, 7.0))
    assert alone.cycle(50.0, steps, 2.0) == 30 + 50 + 4 + 5 + 7 + 10
    # The first step is stored before anything else is begun.
    assert alone.cycle(50.0, steps, 2.0) == 1 + 50 + 6 + 5 + 7 + 10


def test_a_snapshot_comes_by_seconds_of_work_too() -> None:
    alone = clock(0, snapshots_after_s=40.0)
    steps = (Step(FORWARD, 10.0, 0.0), Step(STEP, 20.0, 7.0))
    assert alone.cycle(50.0, steps, 1.0) == 30 + 50 + 4 + 10 + 7 + 20
    assert alone.cycle(50.0, steps, 1.0) == 1 + 50 + 10 + 7 + 20
    assert alone.cycle(50.0, steps, 1.0) == 1 + 50 + 6 + 10 + 7 + 20


def test_touching_segments_are_one_operation_or_each_its_own() -> None:
    burst, each = run("burst"), run("operation")
    assert burst.steps_of(burst.cycle_source.draw(0)) == (
        Step(OperationKind.FORWARD_BACKWARD, 25.0, 0.0),
        Step(STEP, 5.0, 5.0),
    )
    assert each.steps_of(each.cycle_source.draw(0)) == (
        Step(FORWARD, 10.0, 0.0),
        Step(OperationKind.FORWARD_BACKWARD, 15.0, 0.0),
        Step(STEP, 5.0, 5.0),
    )
    assert each.step_named("j1:2:1") == each.steps_of(each.cycle_source.draw(0))[1]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_rollouts_are_ahead_by_the_staleness_and_one_is_trained_on(staleness: int) -> None:
    job = run("burst", staleness)
    for _ in range(staleness + 1):
        assert job.may_roll
        job.begin_rollout()
        assert not job.may_roll
        job.rolling, job.rolled = False, job.rolled + 1
    if job.rolled < job.cycles:
        assert not job.may_roll
    assert job.may_train
    job.begin_cycle()
    assert not job.may_train


def test_cycles_are_counted_by_the_row_or_by_its_duration() -> None:
    assert cycles_of(JOB) == 3
    assert cycles_of(replace(JOB, cycles=None, duration_s=740.0)) == 7
    # Without a period the whole job is one cycle, whatever it counts.
    assert cycles_of(replace(JOB, cycles=9, duration_s=50.0, period_s=None, segments=())) == 1


def test_what_a_job_declares_is_its_row_or_its_training_beside_rollouts() -> None:
    serial = demand_of(JOB, Behaviour())
    assert serial is not None
    assert (serial.period_s, serial.busy_s) == (100.0, 30.0)
    # From the first operation on, as the profiler counts.
    assert [each.offset_s for each in serial.segments] == [0.0, 10.0, 30.0]
    ahead = demand_of(JOB, Behaviour(staleness=1, jitter=0.1))
    assert ahead is not None
    # 65 s of rollout hide 35 s from the first segment to the last.
    assert (ahead.period_s, ahead.jitter_s) == (65.0, 10.0)
    assert ahead.segments[0] == Segment(offset_s=0.0, duration_s=10.0, slack_s=30.0)
    idle = replace(JOB, segments=(TraceSegment(function="update", offset_s=9.0, duration_s=0.0),))
    assert demand_of(idle, Behaviour()) is None
