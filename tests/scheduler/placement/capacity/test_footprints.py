"""Demand traces, their footprints on the ring, and overlaps of footprints."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl import errors
from plexrl.scheduler.placement.capacity.overlaps import footprints_overlap
from plexrl.scheduler.state.demand.trace import (
    CRITICAL_WEIGHT,
    SHORTEST_PLANNED_S,
    SLOT_PARTS,
    DemandTrace,
    Footprint,
    Segment,
    commensurate,
    project,
)
from tests.scheduler.placement.capacity.footprint_strategies import (
    HORIZON,
    busy_slots,
    footprints,
    slow_slots,
)


@given(footprints())
def test_a_footprint_covers_every_slot_it_touches_and_no_other(footprint: Footprint) -> None:
    assert busy_slots(footprint) == slow_slots(footprint)


@given(footprints(), st.floats(0, HORIZON))
def test_a_shifted_footprint_covers_its_intervals(footprint: Footprint, shift: float) -> None:
    for each in (footprint.at(shift), footprint.at(float(math.floor(shift)))):
        wanted = {
            slot % HORIZON
            for start, stop, _ in each.intervals().tolist()
            for slot in range(start, stop)
        }
        assert busy_slots(each) == wanted


@st.composite
def traces(draw: st.DrawFn) -> DemandTrace:
    """Any period and edges, as a profile has them."""
    period_s = draw(st.floats(SHORTEST_PLANNED_S, HORIZON))
    count = draw(st.integers(1, 3))
    edges = sorted(draw(st.lists(st.floats(0, 1), min_size=2 * count, max_size=2 * count)))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return DemandTrace(
        period_s=period_s,
        segments=tuple(
            Segment(offset_s=low * period_s, duration_s=(high - low) * period_s)
            for low, high in pairs
        ),
    )


def exact_slots(trace: DemandTrace, cycles: int, shift: float, less: Fraction) -> set[int]:
    """The slots that the trace touches on the ring for longer than `less` at each end, in
    fractions."""
    period = Fraction(HORIZON, cycles)
    found = set()
    for cycle in range(cycles):
        for segment in trace.segments:
            offset = Fraction(segment.offset_s) * period / Fraction(trace.period_s)
            start = Fraction(shift) + cycle * period + offset
            stop = start + min(Fraction(segment.duration_s), period)
            if stop - start >= 2 * less:
                found |= set(range(math.floor(start + less), math.ceil(stop - less)))
    return {slot % HORIZON for slot in found}


@given(traces(), st.floats(0, HORIZON), st.booleans(), st.integers(0, 40), st.data())
def test_a_footprint_reserves_no_slot_that_its_trace_does_not_touch(
    trace: DemandTrace, shift: float, is_at_an_edge: bool, number: int, data: st.DataObject
) -> None:
    footprint = project(trace, HORIZON)
    cycles = footprint.cycles
    if is_at_an_edge:
        # An edge of a segment of some cycle falls on the edge of a slot, to the last bit.
        segment = data.draw(st.sampled_from(trace.segments))
        offset_s = segment.offset_s * (HORIZON / cycles / trace.period_s)
        edge = offset_s + data.draw(st.sampled_from((0.0, segment.duration_s)))
        shift = abs(math.floor(shift) - edge - number % cycles * HORIZON / cycles)
    busy = busy_slots(footprint.at(shift))
    assert busy <= exact_slots(trace, cycles, shift, Fraction(0))
    assert busy >= exact_slots(trace, cycles, shift, Fraction(4, SLOT_PARTS))


@given(footprints(), footprints(), st.floats(0, HORIZON), st.integers(0, HORIZON))
def test_footprints_overlap_if_they_share_a_slot(
    one: Footprint, other: Footprint, shift: float, slots: int
) -> None:
    for each in (one.at(shift), one.at(float(slots))):
        shares = each.busy() & other.busy() != 0
        assert footprints_overlap(each, other) == footprints_overlap(other, each) == shares


@given(st.floats(4, 50_000), st.sampled_from((0.0, 0.02, 0.1)))
def test_a_commensurate_period_closes_the_ring_and_is_near_the_real_one(
    period_s: float, tolerance: float
) -> None:
    cycles = commensurate(period_s, 28_800, tolerance)
    assert 1 <= cycles <= 28_800
    exact = 28_800 / period_s
    if cycles not in (round(exact), 1):
        assert 28_800 % cycles == 0
        assert abs(28_800 / cycles - period_s) <= tolerance * period_s + 1e-6


def test_published_periods_become_whole_slots() -> None:
    assert [28_800 / commensurate(p, 28_800, 0.02) for p in (289.03, 284.80, 589.71)] == [
        288.0,
        288.0,
        600.0,
    ]


@pytest.mark.parametrize(
    ("period_s", "segments"),
    [
        (0.0, ((0.0, 1.0),)),
        (float("inf"), ((0.0, 1.0),)),
        (10.0, ()),
        (10.0, ((5.0, 6.0),)),
        (10.0, ((0.0, 3.0), (2.0, 3.0))),
        (10.0, ((-1.0, 3.0),)),
    ],
)
def test_a_malformed_trace_is_refused(
    period_s: float, segments: tuple[tuple[float, float], ...]
) -> None:
    with pytest.raises(errors.InvalidRequestError):
        DemandTrace(
            period_s=period_s,
            segments=tuple(Segment(offset_s=at, duration_s=for_s) for at, for_s in segments),
        )


@pytest.mark.parametrize(("slack_s", "is_critical"), [(5.9, True), (6.0, False), (6.1, False)])
def test_a_segment_that_may_be_late_by_its_own_duration_is_not_critical(
    slack_s: float, is_critical: bool
) -> None:
    segment = Segment(offset_s=0.0, duration_s=6.0, slack_s=slack_s)
    trace = DemandTrace(period_s=60.0, segments=(segment,))
    assert trace.has_critical is is_critical
    ((_, _, weight),) = project(trace, HORIZON).segments
    assert weight == (CRITICAL_WEIGHT if is_critical else 1)


def test_a_cycle_too_short_for_slots_is_planned_as_a_block_of_the_same_duty() -> None:
    quick = DemandTrace(
        period_s=0.01, segments=tuple(Segment(offset_s=i / 1e4, duration_s=5e-5) for i in range(60))
    )
    footprint = project(quick, 28_800)
    assert len(footprint.intervals()) <= 28_800 / 4
    ((_, duration, _),) = footprint.segments
    assert duration / footprint.period == pytest.approx(quick.duty)


@pytest.mark.parametrize("period_s", [1e-310, 1e-9, 1e300, float("nan")])
def test_an_absurd_period_is_refused(period_s: float) -> None:
    with pytest.raises(errors.InvalidRequestError):
        DemandTrace(period_s=period_s, segments=(Segment(offset_s=0.0, duration_s=0.0),))


def test_work_that_has_slack_weighs_less() -> None:
    trace = DemandTrace(
        period_s=12.0,
        segments=(
            Segment(offset_s=0.0, duration_s=2.0),
            Segment(offset_s=5.0, duration_s=2.0, slack_s=3.0),
        ),
    )
    assert [weight for _, _, weight in project(trace, HORIZON).segments] == [CRITICAL_WEIGHT, 1]


def test_footprints_that_lie_nearly_a_slot_apart_may_share_one() -> None:
    one = Footprint(horizon_slots=HORIZON, cycles=1, shift=0.0, segments=((0.0, 10.0625, 4),))
    shares = Footprint(horizon_slots=HORIZON, cycles=1, shift=0.0, segments=((10.9375, 5.0, 4),))
    apart = Footprint(horizon_slots=HORIZON, cycles=1, shift=0.0, segments=((11.0, 5.0, 4),))
    for each, overlaps in ((shares, True), (apart, False)):
        assert footprints_overlap(one, each) == footprints_overlap(each, one) == overlaps
