"""The capacity index against slow readings of the same words, slot by slot."""

import functools
import math
import operator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plexrl import errors
from plexrl.scheduler.capacity.free_intervals import FreeIntervals
from plexrl.scheduler.capacity.index import CapacityIndex, Shape
from plexrl.scheduler.capacity.overlaps import meet
from plexrl.scheduler.capacity.segment_tree import SegmentTree
from plexrl.scheduler.capacity.shift_search import ShiftSearch
from plexrl.scheduler.state.demand import (
    CRITICAL_WEIGHT,
    DemandTrace,
    Footprint,
    Segment,
    commensurate,
    project,
    slots_of,
    whole_ring,
)

HORIZON = 120
SHAPE = Shape("t", 1 << 30, 8)


@st.composite
def footprints(draw: st.DrawFn, cycles: st.SearchStrategy[int] | None = None) -> Footprint:
    count = draw(cycles if cycles is not None else st.sampled_from((1, 2, 3, 4, 5, 6, 7, 9, 10)))
    period = HORIZON / count
    segments, at = [], 0.0
    for _ in range(draw(st.integers(1, 3))):
        # Quarters are exact, so that both readings round the same number.
        at += draw(st.integers(0, int(period * 4 / 3))) / 4
        length = draw(st.integers(1, max(1, int(period)))) / 4
        if at + length > period:
            break
        segments.append((at, length, draw(st.sampled_from((1, CRITICAL_WEIGHT)))))
        # The next one starts in a slot of its own.
        at = float(math.ceil(at + length))
    assume(segments)
    shift = draw(st.integers(0, math.ceil(period) - 1))
    return Footprint(
        horizon_slots=HORIZON, cycles=count, shift=float(shift), segments=tuple(segments)
    )


def slow_slots(footprint: Footprint) -> set[int]:
    """Every slot that a segment of any cycle touches."""
    found = set()
    for cycle in range(footprint.cycles):
        base = cycle * footprint.horizon_slots / footprint.cycles + footprint.shift
        for offset, duration, _ in footprint.segments:
            slot = math.floor(base + offset)
            while slot < base + (offset + duration):
                found.add(slot % footprint.horizon_slots)
                slot += 1
    return found


@given(footprints())
def test_a_footprint_covers_every_slot_it_touches_and_no_other(footprint: Footprint) -> None:
    assert set(np.flatnonzero(footprint.weights()).tolist()) == slow_slots(footprint)
    slots = slots_of(footprint.busy(), footprint.horizon_slots)
    assert set(np.flatnonzero(slots).tolist()) == slow_slots(footprint)


@given(footprints(), st.floats(0, HORIZON))
def test_a_footprint_turns_with_its_shift(footprint: Footprint, shift: float) -> None:
    for each in (footprint.at(shift), footprint.at(float(math.floor(shift)))):
        wanted = {
            slot % HORIZON
            for start, stop, _ in each.intervals().tolist()
            for slot in range(start, stop)
        }
        slots = slots_of(each.busy(), HORIZON)
        assert set(np.flatnonzero(slots).tolist()) == wanted


@given(footprints(), footprints(), st.floats(0, HORIZON), st.integers(0, HORIZON))
def test_footprints_meet_where_they_share_a_slot(
    one: Footprint, other: Footprint, shift: float, slots: int
) -> None:
    for each in (one.at(shift), one.at(float(slots))):
        shares = each.busy() & other.busy() != 0
        assert meet(each, other) == meet(other, each) == shares


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


class SlowRing:
    """The segment tree's words, slot by slot."""

    def __init__(self, size: int, value: int) -> None:
        self.slots = [value] * size

    def add(self, start: int, stop: int, delta: int) -> None:
        for slot in range(start, stop):
            self.slots[slot % len(self.slots)] += delta

    def first_fit(self, start: int, duration: int, need: int) -> int | None:
        size = len(self.slots)
        for begin in range(start, start + size):
            if duration <= size and all(
                self.slots[slot % size] >= need for slot in range(begin, begin + duration)
            ):
                return begin % size
        return None


@settings(max_examples=300)
@given(st.data(), st.integers(1, 60))
def test_the_segment_tree_is_the_slow_ring(data: st.DataObject, size: int) -> None:
    tree, slow = SegmentTree(size, 3), SlowRing(size, 3)
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.integers(0, size - 1))
        stop = start + data.draw(st.integers(1, size))
        if data.draw(st.booleans()):
            delta = data.draw(st.integers(-3, 3))
            tree.add(start, stop, delta)
            slow.add(start, stop, delta)
        else:
            pattern = data.draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size))
            tree.add_pattern(np.array(pattern, dtype=np.int32))
            slow.slots = [a + b for a, b in zip(slow.slots, pattern, strict=True)]
        assert tree.values().tolist() == slow.slots
        assert tree.min(start, stop) == min(slow.slots[s % size] for s in range(start, stop))
        need = data.draw(st.integers(-3, 6))
        duration = data.draw(st.integers(0, size + 1))
        assert tree.first_fit(start, duration, need) == slow.first_fit(start, duration, need)


@given(st.lists(footprints(), max_size=3), footprints())
def test_free_windows_hold_what_no_resident_touches(
    residents: list[Footprint], newcomer: Footprint
) -> None:
    busy = set().union(*(slow_slots(resident) for resident in residents)) if residents else set()
    taken = functools.reduce(operator.or_, (each.busy() for each in residents), 0)
    free = FreeIntervals(HORIZON, taken)
    assert int((free.stops - free.starts).sum()) == HORIZON - len(busy)
    assert free.fits(newcomer) == (not busy & slow_slots(newcomer))
    assert all(stop > start for start, stop in zip(free.starts, free.stops, strict=True))
    assert all(b > a for a, b in zip(free.stops, free.starts[1:], strict=False))


def index_with(residents: list[Footprint]) -> CapacityIndex:
    index = CapacityIndex(HORIZON)
    index.add_gpus("t", 8)
    index.add_group("g", SHAPE, serial=1)
    for number, resident in enumerate(residents):
        index.reserve("g", f"r{number}", resident, 0.1, strict=False)
    return index


def search(
    index: CapacityIndex, job: Footprint, start: int, *, strict: bool, margin: int = 0
) -> tuple[int, float, float] | None:
    table = index.table(SHAPE)
    wanted = ShiftSearch(
        footprint=job.at(0.0),
        start_slot=start,
        margin_slots=margin,
        interference_weight=7.0,
        strict=strict,
    )
    found = table.search(np.array([0]), wanted)
    if not found:
        return None
    (fit,) = found
    return fit.shift_slots, fit.overlap_s, fit.cost


WHOLE = st.sampled_from((1, 2, 3, 4, 5, 6, 10))


@settings(max_examples=200)
@given(st.lists(footprints(WHOLE), max_size=3), footprints(WHOLE), st.integers(0, HORIZON - 1))
def test_the_micro_shift_is_the_smallest_that_brute_force_finds(
    residents: list[Footprint], job: Footprint, start: int
) -> None:
    index = index_with(residents)
    busy = set().union(*(slow_slots(resident) for resident in residents)) if residents else set()
    fitting = [
        shift
        for shift in range(HORIZON // job.cycles)
        if not busy & slow_slots(job.at(float(start + shift)))
    ]
    found = search(index, job, start, strict=True)
    assert (None if found is None else found[0]) == (min(fitting) if fitting else None)


@settings(max_examples=200)
@given(st.lists(footprints(), max_size=3), footprints(), st.integers(0, HORIZON - 1))
def test_what_a_strict_search_finds_fits_on_the_ring_whatever_the_periods(
    residents: list[Footprint], job: Footprint, start: int
) -> None:
    index = index_with(residents)
    found = search(index, job, start, strict=True)
    if found is not None:
        index.reserve("g", "new", job.at(float(start + found[0])), 0.1, strict=True)


@settings(max_examples=200)
@given(
    st.lists(footprints(WHOLE), min_size=1, max_size=3),
    footprints(WHOLE),
    st.integers(0, HORIZON - 1),
)
def test_the_least_overlap_is_that_of_a_circular_cross_correlation_by_fft(
    residents: list[Footprint], job: Footprint, start: int
) -> None:
    index = index_with(residents)
    ring = np.sum([resident.weights() for resident in residents], axis=0)
    period = HORIZON // job.cycles
    folded = ring.reshape(job.cycles, period).sum(axis=0)
    demand = np.zeros(period)
    for low, high, _ in job.at(float(start % period)).edges():
        for cell in range(low, high):
            demand[cell % period] += 1
    overlap = np.fft.irfft(np.fft.rfft(folded) * np.conj(np.fft.rfft(demand)), period)
    overlap = np.rint(overlap) / (job.cycles * CRITICAL_WEIGHT)
    cost = np.arange(period) + 7.0 * overlap
    found = search(index, job, start, strict=False)
    assert found is not None
    assert found[2] == pytest.approx(cost.min())


@given(st.lists(footprints(), max_size=3), footprints())
def test_a_release_restores_the_index_exactly(
    residents: list[Footprint], newcomer: Footprint
) -> None:
    index = index_with(residents)
    before = index.profile("t").values().tolist()
    windows = index.free_intervals("g").starts.tolist()
    load = index.load("g")
    index.reserve("g", "new", newcomer, 0.1, strict=False)
    index.release("g", "new")
    assert index.profile("t").values().tolist() == before
    assert index.free_intervals("g").starts.tolist() == windows
    assert index.load("g") == load


@given(st.lists(footprints(), min_size=1, max_size=3), st.data())
def test_a_footprint_replaced_leaves_the_index_as_one_made_anew(
    residents: list[Footprint], data: st.DataObject
) -> None:
    index = index_with(residents)
    for _ in range(3):
        number = data.draw(st.integers(0, len(residents) - 1))
        residents[number] = data.draw(footprints())
        if data.draw(st.booleans()):
            index.profile("t")
        index.replace("g", f"r{number}", residents[number], 0.1)
    index.check_equal(index_with(residents))


@given(st.lists(footprints(), max_size=4))
def test_no_slot_is_given_twice_and_a_refused_reservation_changes_nothing(
    wanted: list[Footprint],
) -> None:
    index = index_with([])
    held: list[set[int]] = []
    for number, footprint in enumerate(wanted):
        before = index.profile("t").values().tolist()
        slots = slow_slots(footprint)
        if any(slots & other for other in held):
            with pytest.raises(errors.CapacityError):
                index.reserve("g", f"r{number}", footprint, 0.1, strict=True)
            assert index.profile("t").values().tolist() == before
        else:
            index.reserve("g", f"r{number}", footprint, 0.1, strict=True)
            held.append(slots)
    busy = set().union(*held) if held else set()
    values = index.profile("t").values().tolist()
    assert values == [0 if slot in busy else 8 for slot in range(HORIZON)]


def test_what_is_always_busy_leaves_no_window() -> None:
    index = index_with([whole_ring(HORIZON)])
    assert len(index.free_intervals("g").starts) == 0
    assert not index.gang_feasible("t", 1, 1)


@given(footprints(), st.booleans())
def test_a_gang_is_feasible_for_as_long_as_the_profile_says(
    footprint: Footprint, is_open: bool
) -> None:
    index = index_with([footprint])
    index.set_room("g", is_open=is_open, host_bytes_free=0, state_bytes_free=0)
    for duration in range(1, HORIZON + 1):
        fits = index.profile("t").first_fit(0, duration, 8) is not None
        assert index.gang_feasible("t", 8, duration) == fits


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


def test_a_cycle_too_short_for_slots_is_planned_as_a_block_of_the_same_duty() -> None:
    quick = DemandTrace(
        period_s=0.01, segments=tuple(Segment(offset_s=i / 1e4, duration_s=5e-5) for i in range(60))
    )
    footprint = project(quick, 28_800)
    assert len(footprint.intervals()) <= 28_800 / 4
    ((_, duration, _),) = footprint.segments
    assert duration / footprint.period == pytest.approx(quick.duty)


@pytest.mark.parametrize("period_s", [1e-310, 1e-9, 1e300, float("nan")])
def test_a_period_beyond_all_reason_is_refused(period_s: float) -> None:
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
