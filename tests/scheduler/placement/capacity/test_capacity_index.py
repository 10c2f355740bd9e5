"""The capacity index against slow oracles that count slot by slot."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl import errors
from plexrl.scheduler.placement.capacity.index import (
    CANDIDATES_PER_PASS,
    CapacityIndex,
    CapacityShape,
    ShapeTable,
    sorted_passes,
)
from plexrl.scheduler.placement.capacity.shift_search import ShiftSearch, is_off_plan
from plexrl.scheduler.state.demand.trace import CRITICAL_WEIGHT, Footprint, whole_ring
from tests.examples import examples
from tests.scheduler.placement.capacity.footprint_strategies import HORIZON, footprints, slow_slots

Segments = tuple[tuple[float, float, int], ...]
SHAPE = CapacityShape("t", 1 << 30, 8)


def index_with(residents: list[Footprint]) -> CapacityIndex:
    index = CapacityIndex(HORIZON)
    index.add_group("g", SHAPE, serial=1)
    for number, resident in enumerate(residents):
        index.reserve("g", f"r{number}", resident, 0.1)
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


def slow_weights(footprint: Footprint) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The weight of a footprint in each slot, the larger one where two segments touch a slot."""
    ring = np.zeros(footprint.horizon_slots)
    for cycle in range(footprint.cycles):
        base = cycle * footprint.horizon_slots / footprint.cycles + footprint.shift
        for offset, duration, weight in footprint.segments:
            for slot in range(math.floor(base + offset), math.ceil(base + offset + duration)):
                at = slot % footprint.horizon_slots
                ring[at] = max(ring[at], weight)
    return ring


WHOLE = st.sampled_from((1, 2, 3, 4, 5, 6, 10))


@settings(max_examples=examples(200))
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


@settings(max_examples=examples(200))
@given(st.lists(footprints(), max_size=3), footprints(), st.integers(0, HORIZON - 1))
def test_a_strict_fit_fits_on_the_ring_for_any_periods(
    residents: list[Footprint], job: Footprint, start: int
) -> None:
    index = index_with(residents)
    found = search(index, job, start, strict=True)
    if found is not None:
        placed = job.at(float(start + found[0]))
        assert all(not slow_slots(placed) & slow_slots(resident) for resident in residents)
        index.check_free("g", "new", placed)


@pytest.mark.parametrize(
    ("resident", "job", "start"),
    [
        ((7, 0.0, ((0.25, 1.25, 4),)), (9, 3.0, ((1.75, 0.5, 4),)), 34),
        (
            (9, 11.0, ((3.5, 2.0, 4), (6.0, 1.0, 4))),
            (9, 10.0, ((3.0, 1.25, 4), (6.75, 2.25, 4))),
            48,
        ),
    ],
)
def test_edges_that_each_cycle_of_a_fractional_period_rounds_anew_leave_a_margin(
    resident: tuple[int, float, Segments], job: tuple[int, float, Segments], start: int
) -> None:
    """With a margin of none, or of one cell, these would share a slot."""
    one, other = (
        Footprint(horizon_slots=HORIZON, cycles=cycles, shift=shift, segments=segments)
        for cycles, shift, segments in (resident, job)
    )
    found = search(index_with([one]), other, start, strict=True)
    if found is not None:
        assert not slow_slots(other.at(float(start + found[0]))) & slow_slots(one)


@settings(max_examples=examples(200))
@given(
    st.lists(footprints(WHOLE), min_size=1, max_size=3),
    footprints(WHOLE),
    st.integers(0, HORIZON - 1),
)
def test_the_least_overlap_is_that_of_a_circular_cross_correlation_by_fft(
    residents: list[Footprint], job: Footprint, start: int
) -> None:
    index = index_with(residents)
    ring = np.zeros(HORIZON)
    for resident in residents:
        ring += slow_weights(resident)
    period = HORIZON // job.cycles
    folded = ring.reshape(job.cycles, period).sum(axis=0)
    demand = np.zeros(period)
    for offset, duration, _ in job.segments:
        begin = start % period + offset
        for cell in range(math.floor(begin), math.ceil(begin + duration)):
            demand[cell % period] += 1
    overlap = np.fft.irfft(np.fft.rfft(folded) * np.conj(np.fft.rfft(demand)), period)
    overlap = np.rint(overlap) / (job.cycles * CRITICAL_WEIGHT)
    cost = 7.0 * overlap
    found = search(index, job, start, strict=False)
    assert found is not None
    assert found[2] == pytest.approx(cost.min())
    assert found[0] == np.flatnonzero(np.isclose(cost, cost.min()))[0]


@given(st.lists(footprints(), max_size=3), footprints())
def test_a_release_restores_the_index_exactly(
    residents: list[Footprint], newcomer: Footprint
) -> None:
    index = index_with(residents)
    before, load = index.slots("g").busy_of_all(), index.load("g")
    index.reserve("g", "new", newcomer, 0.1)
    index.release("g", "new")
    assert index.slots("g").busy_of_all() == before
    assert index.load("g") == load
    index.check_equal(index_with(residents))


@given(st.lists(footprints(), min_size=1, max_size=3), st.data())
def test_replacing_footprints_gives_the_same_index_as_a_rebuild(
    residents: list[Footprint], data: st.DataObject
) -> None:
    index = index_with(residents)
    for _ in range(3):
        number = data.draw(st.integers(0, len(residents) - 1))
        residents[number] = data.draw(footprints())
        if data.draw(st.booleans()):
            search(index, residents[number], 0, strict=False)
        index.replace("g", f"r{number}", residents[number], 0.1)
    index.check_equal(index_with(residents))


@given(st.lists(footprints(), max_size=4))
def test_no_slot_is_reserved_twice_and_a_refused_reservation_changes_nothing(
    wanted: list[Footprint],
) -> None:
    index = index_with([])
    held: list[set[int]] = []
    for number, footprint in enumerate(wanted):
        before = index.slots("g").busy_of_all()
        slots = slow_slots(footprint)
        if any(slots & other for other in held):
            with pytest.raises(errors.CapacityError):
                index.check_free("g", f"r{number}", footprint)
            assert index.slots("g").busy_of_all() == before
        else:
            index.check_free("g", f"r{number}", footprint)
            index.reserve("g", f"r{number}", footprint, 0.1)
            held.append(slots)
    busy = set().union(*held) if held else set()
    found = index.slots("g").busy_of_all()
    assert {slot for slot in range(HORIZON) if found >> slot & 1} == busy


def test_a_group_that_is_always_busy_has_no_strict_fit() -> None:
    index = index_with([whole_ring(HORIZON)])
    job = Footprint(horizon_slots=HORIZON, cycles=1, shift=0.0, segments=((0.0, 1.0, 1),))
    assert search(index, job, 0, strict=True) is None


FULL_RING = 28_800
FULL_RING_CYCLES = st.sampled_from((24, 48, 96, 97, 100))
groups = st.lists(st.lists(footprints(WHOLE), max_size=3), min_size=2, max_size=6)


def all_busy(residents: list[Footprint]) -> set[int]:
    return set().union(*(slow_slots(resident) for resident in residents)) if residents else set()


def index_of_groups(clusters: list[list[Footprint]], horizon: int) -> CapacityIndex:
    index = CapacityIndex(horizon)
    for number, residents in enumerate(clusters):
        index.add_group(f"g{number}", SHAPE, serial=number)
        for member, resident in enumerate(residents):
            index.reserve(f"g{number}", f"r{number}/{member}", resident, 0.1)
    return index


@settings(max_examples=examples(200))
@given(groups, footprints(WHOLE), st.integers(0, HORIZON - 1), st.data())
def test_a_search_of_several_groups_finds_the_smallest_shift_of_each(
    clusters: list[list[Footprint]], job: Footprint, start: int, data: st.DataObject
) -> None:
    index = index_of_groups(clusters, HORIZON)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(clusters) - 1), min_size=1)))
    names = [f"g{number}" for number in chosen]
    rows = [index.row(name, SHAPE) for name in names]
    expected = {}
    for number, row in zip(chosen, rows, strict=True):
        busy = all_busy(clusters[number])
        for shift in range(HORIZON // job.cycles):
            if not busy & slow_slots(job.at(float(start + shift))):
                expected[row] = shift
                break
    wanted = ShiftSearch(
        footprint=job.at(0.0),
        start_slot=start,
        margin_slots=0,
        interference_weight=7.0,
        strict=True,
    )
    found = index.table(SHAPE).search(np.array(rows), wanted)
    assert {fit.row: fit.shift_slots for fit in found} == expected


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(footprints(FULL_RING_CYCLES, FULL_RING), min_size=1, max_size=3),
    footprints(FULL_RING_CYCLES, FULL_RING),
    st.integers(0, FULL_RING - 1),
)
def test_a_strict_fit_on_the_full_ring_is_free_in_every_cycle(
    residents: list[Footprint], job: Footprint, start: int
) -> None:
    index = index_of_groups([residents], FULL_RING)
    found = search(index, job, start, strict=True)
    busy = all_busy(residents)
    if found is not None:
        assert not busy & slow_slots(job.at(float(start + found[0])))
    if all(FULL_RING % each.cycles == 0 for each in (*residents, job)):
        # With whole periods the search is exact: no smaller shift fits.
        shifts = range(FULL_RING // job.cycles if found is None else found[0])
        for shift in shifts:
            assert busy & slow_slots(job.at(float(start + shift)))


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(1, 10 * CANDIDATES_PER_PASS), st.integers(0, 2**32), st.integers(1, 50))
def test_the_candidate_limit_keeps_the_least_loaded_groups_in_order(
    count: int, seed: int, distinct: int
) -> None:
    table = ShapeTable(SHAPE, HORIZON)
    for number in range(count):
        table.add(f"g{number}", serial=count - number)
    rng = np.random.default_rng(seed)
    table.load[:count] = rng.integers(0, distinct, count) / distinct
    rows = np.flatnonzero(rng.random(len(table.load)) < 0.9)
    rows = rows[rows < count]
    passes = sorted_passes(table, rows, table.load)
    assert all(0 < len(each) <= CANDIDATES_PER_PASS for each in passes)
    ordered = sorted(rows.tolist(), key=lambda row: (table.load[row], table.serial[row]))
    assert [row for each in passes for row in each.tolist()] == ordered[: 8 * CANDIDATES_PER_PASS]


@pytest.mark.parametrize(
    ("started_at", "is_off"),
    [
        *((50.0, False), (60.0, False), (60.5, True), (40.0, False), (39.5, True), (100.0, True)),
        *((340.0, False), (339.5, True), (350.0, False)),
    ],
)
def test_a_cycle_leaves_its_plan_when_it_starts_off_by_more_than_a_tenth_of_its_period(
    started_at: float, is_off: bool
) -> None:
    """Early or late, in any cycle of the ring; the plan has a shift of 50 and a period of 100."""
    assert is_off_plan(started_at, 50.0, 100.0) is is_off
