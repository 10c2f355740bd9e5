"""Random footprints on small rings, and their slots counted one by one."""

import math

from hypothesis import assume
from hypothesis import strategies as st

from plexrl.scheduler.state.demand.trace import CRITICAL_WEIGHT, Footprint

HORIZON = 120
CYCLES = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 9, 10))


@st.composite
def footprints(
    draw: st.DrawFn, cycles: st.SearchStrategy[int] = CYCLES, horizon: int = HORIZON
) -> Footprint:
    """One to three segments in each of `cycles` cycles; edges at quarters of a slot."""
    count = draw(cycles)
    period = horizon / count
    segments, at = [], 0.0
    for _ in range(draw(st.integers(1, 3))):
        # Quarters are exact in floats, so the oracle rounds the same numbers.
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
        horizon_slots=horizon, cycles=count, shift=float(shift), segments=tuple(segments)
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


def busy_slots(footprint: Footprint) -> set[int]:
    """The slots that `Footprint.busy` marks."""
    return {slot for slot in range(footprint.horizon_slots) if footprint.busy() >> slot & 1}
