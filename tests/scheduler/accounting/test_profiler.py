"""The profiler finds the cycle that made the log, whatever warm-up, stragglers and waiting hide."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.accounting import profiler
from plexrl.scheduler.rules.settings import ProfilerConfig
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.deployment.cycles import BusySpan, Cycle
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind
from tests.examples import examples

CONFIG = ProfilerConfig(cycles=3, first=3, drift_tolerance=0.2)


def deployment() -> Deployment:
    return Deployment(
        deployment="a/actor",
        job="a",
        created_at=0.0,
        spec=RequestedSpec(
            kind="train",
            workers=2,
            state_bytes=1,
            exclusive=False,
            spec_json="{}",
        ),
        demand=Demand(
            estimates=Estimates(1),
        ),
    )


def live(
    one: Deployment, now: float, rollout_s: float, runs: list[tuple[OperationKind, float, float]]
) -> float:
    """One cycle: each run is (kind, seconds waited for the group, seconds on it)."""
    now += rollout_s
    for kind, waited_s, seconds in runs:
        one.demand.burst.want(now)
        now += waited_s
        profiler.next_began(one, kind, now)
        profiler.run_began(one, now, overlapped=False)
        began_at, now = now, now + seconds
        profiler.run_ended(one, kind, began_at, now, overlapped=False)
    return now


CYCLE = (
    (OperationKind.FORWARD, 9.66),
    (OperationKind.FORWARD_BACKWARD, 30.0),
    (OperationKind.OPTIM_STEP, 8.08),
    (OperationKind.PUBLISH, 9.76),
)
BUSY_S = sum(seconds for _, seconds in CYCLE)


def test_a_cycle_with_warm_up_a_straggler_and_waiting_gives_the_trace_of_the_job_alone() -> None:
    one, now, rng = deployment(), 100.0, random.Random(7)
    for index in range(9):
        slow = 4.0 if index == 0 else 1.0
        rollout_s = 2000.0 if index == 5 else 231.5
        runs = [(kind, rng.choice((0.0, 0.0, 40.0)), slow * s) for kind, s in CYCLE]
        now = live(one, now, rollout_s, runs)
    assert profiler.refresh(one, CONFIG)
    assert one.demand.trace is not None
    assert one.demand.trace.period_s == pytest.approx(231.5 + BUSY_S)
    assert [segment.duration_s for segment in one.demand.trace.segments] == [pytest.approx(BUSY_S)]
    assert one.demand.trace.jitter_s == pytest.approx(0.0, abs=1e-6)


def test_a_job_that_publishes_nothing_has_cycles_that_end_with_the_optimizer_step() -> None:
    one, now = deployment(), 0.0
    for _ in range(6):
        now = live(
            one,
            now,
            5.0,
            [(OperationKind.FORWARD_BACKWARD, 0.0, 3.0), (OperationKind.OPTIM_STEP, 0.0, 1.0)],
        )
    assert profiler.refresh(one, CONFIG)
    assert one.demand.trace is not None
    assert one.demand.trace.period_s == pytest.approx(9.0)


def test_a_long_pause_inside_a_cycle_makes_two_segments() -> None:
    one, now = deployment(), 0.0
    for _ in range(6):
        now = live(one, now, 50.0, [(OperationKind.FORWARD, 0.0, 10.0)])
        now = live(one, now, 20.0, [(OperationKind.PUBLISH, 0.0, 20.0)])
    assert profiler.refresh(one, CONFIG)
    assert one.demand.trace is not None
    assert [s.offset_s for s in one.demand.trace.segments] == pytest.approx([0.0, 30.0])
    assert [s.duration_s for s in one.demand.trace.segments] == pytest.approx([10.0, 20.0])


def test_a_lasting_change_renews_the_profile_and_one_slow_cycle_does_not() -> None:
    one, now = deployment(), 0.0
    runs = [(OperationKind.FORWARD_BACKWARD, 0.0, 10.0), (OperationKind.PUBLISH, 0.0, 1.0)]
    for _ in range(6):
        now = live(one, now, 50.0, runs)
        profiler.refresh(one, CONFIG)
    first = one.demand.trace
    now = live(one, now, 500.0, runs)
    for _ in range(4):
        now = live(one, now, 50.0, runs)
        assert not profiler.refresh(one, CONFIG)
    assert one.demand.trace is first
    renewed = 0
    for _ in range(8):
        now = live(one, now, 90.0, runs)
        renewed += profiler.refresh(one, CONFIG)
    assert renewed >= 1
    assert one.demand.trace is not None
    assert one.demand.trace.period_s == pytest.approx(101.0)


def test_what_runs_beside_a_rollout_has_slack_until_the_next_segment() -> None:
    cycles = [
        Cycle(
            started_at=0.0,
            length_s=100.0,
            waited_s=0.0,
            busy_s=30.0,
            spans=(BusySpan(offset_s=0.0, duration_s=30.0, overlapped=True),),
        )
    ] * 3
    found = profiler.profile(cycles)
    assert found is not None
    assert found.segments == (Segment(offset_s=0.0, duration_s=30.0, slack_s=70.0),)


spans = st.builds(
    BusySpan,
    offset_s=st.floats(0, 1e3),
    duration_s=st.floats(0, 1e3),
    overlapped=st.booleans(),
)
cycles_of_anything = st.builds(
    lambda length, waited, found: Cycle(
        started_at=0.0,
        length_s=length,
        waited_s=waited * length,
        busy_s=sum(span.duration_s for span in found),
        spans=tuple(found),
    ),
    st.floats(1e-3, 1e4),
    st.floats(0, 1),
    st.lists(spans, max_size=6),
)


@settings(max_examples=examples(300))
@given(st.lists(cycles_of_anything, max_size=8))
def test_any_log_gives_a_valid_trace_or_none(cycles: list[Cycle]) -> None:
    found = profiler.profile(cycles) if cycles else None
    assert found is None or isinstance(found, DemandTrace)
    part = profiler.waiting_part(cycles)
    assert part is None or 0.0 <= part <= 1.0 + 1e-9


def cycle_of(*spans: BusySpan, length_s: float = 100.0) -> Cycle:
    busy_s = sum(span.duration_s for span in spans)
    return Cycle(started_at=0.0, length_s=length_s, waited_s=0.0, busy_s=busy_s, spans=spans)


def test_a_wait_beside_a_rollout_delays_nothing_only_if_the_trainer_idles_afterwards() -> None:
    def waited_s(idle_s: float) -> float:
        one, now = deployment(), 0.0
        for _ in range(4):
            began_at = now
            one.demand.burst.want(now)
            now += 30.0
            profiler.next_began(one, OperationKind.OPTIM_STEP, now)
            profiler.run_began(one, now, overlapped=True)
            now += 70.0 - idle_s
            profiler.run_ended(one, OperationKind.OPTIM_STEP, now - 1, now, overlapped=False)
            now = began_at + 100.0
        return one.demand.cycles.measured[-1].waited_s

    usual_s = profiler.MERGE_PART * 100.0
    assert waited_s(usual_s + 1.0) == 0.0
    assert waited_s(usual_s - 1.0) == 30.0, "so short a pause is the controller's own step"


def test_of_equally_common_numbers_of_segments_the_smaller_one_counts() -> None:
    one = cycle_of(BusySpan(0.0, 30.0, False))
    two = cycle_of(BusySpan(0.0, 30.0, False), BusySpan(60.0, 10.0, False))
    for cycles in ([one, one, two, two], [two, two, one, one]):
        found = profiler.profile(cycles)
        assert found is not None
        assert len(found.segments) == 1


def test_a_segment_has_slack_if_it_overlapped_in_more_than_half_of_the_cycles() -> None:
    def slack_s(*overlapped: bool) -> float:
        found = profiler.profile([cycle_of(BusySpan(0.0, 30.0, each)) for each in overlapped])
        assert found is not None
        return found.segments[0].slack_s

    assert slack_s(True, False, True, False) == 0.0
    assert slack_s(True, True, True, False) == 70.0


def test_jitter_is_the_deviation_of_a_normal_distribution() -> None:
    rng = random.Random(3)
    lengths = [rng.gauss(100.0, 5.0) for _ in range(999)]
    found = profiler.profile([cycle_of(BusySpan(0.0, 9.0, False), length_s=s) for s in lengths])
    assert found is not None
    assert found.jitter_s == pytest.approx(5.0, rel=0.15)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_cycles_that_become_shorter_or_longer_or_less_or_more_busy_are_a_drift(
    factor: float,
) -> None:
    usual = profiler.profile([cycle_of(BusySpan(0.0, 30.0, False))] * 3)
    assert usual is not None
    other_period = [cycle_of(BusySpan(0.0, 30.0, False), length_s=100.0 * factor)] * 3
    other_work = [cycle_of(BusySpan(0.0, 30.0 * factor, False))] * 3
    for cycles in (other_period, other_work):
        assert profiler.has_drifted(usual, cycles, 0.2)
        assert not profiler.has_drifted(
            usual, [*cycles[:2], cycle_of(BusySpan(0.0, 30.0, False))], 0.2
        )
