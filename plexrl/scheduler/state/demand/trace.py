"""Demand traces and footprints: the demand of a training deployment over time.

A *demand trace* is one measured cycle: a period and the busy segments in it. A *footprint* is that
trace on the scheduler's horizon, a ring of `horizon_slots` slots of one second:
slot(t) = ⌊t⌋ mod H (PlexRL §4.3.1). A footprint has a whole number of cycles in the ring.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from plexrl.errors import InvalidRequestError

PERIOD_S_MIN = 1e-3
PERIOD_S_MAX = 1e9

SEGMENTS_MAX = 64
"""Segments of one cycle. A footprint has one interval for each cycle and segment."""

SHORTEST_PLANNED_S = 4.0
"""A shorter cycle is planned as one block with the same duty in a cycle of this length, because
slots are too coarse for it."""

INTERVALS_MAX = 50_000
"""Maximum of one footprint; a cycle with more is planned as one block too."""

TURNS_MAX = 16
"""Maximum entries of the cache `Footprint.turns`; an entry takes at most 4 kB."""

SLOT_PARTS = 1 << 20
"""Shifts, offsets and durations of a footprint are whole numbers of these parts of a slot: a
microsecond. The slots that a segment covers are then computed in integers, and do not depend on
where on the ring it lies, nor on how the sum is made."""

EDGE_PARTS = 2
"""A segment does not take a slot that it touches for at most this many parts: its edges were
rounded to whole parts, and so may have passed the edge of the slot by rounding alone."""

CRITICAL_WEIGHT = 4
"""Weight of a busy second that must not be delayed; a second with slack has weight 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One busy stretch of a cycle."""

    offset_s: float
    """Start, relative to the start of the cycle."""
    duration_s: float
    slack_s: float = 0.0
    """Delay that does not lengthen the cycle (PlexRL §7.1)."""

    @property
    def is_critical(self) -> bool:
        """Whether a delay by its own duration would lengthen the cycle."""
        return self.slack_s < self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandTrace:
    """A cycle of a job on its group, as the profiler measured it or the user declared it."""

    period_s: float
    segments: tuple[Segment, ...]
    """In order of their offsets, disjoint, inside the period."""
    jitter_s: float = 0.0
    """Standard deviation of the cycle's length."""
    cycles: int = 0
    """Number of measured cycles; 0: the trace was declared."""

    def __post_init__(self) -> None:
        if not PERIOD_S_MIN <= self.period_s <= PERIOD_S_MAX:
            raise InvalidRequestError(
                f"a demand trace needs a period of {PERIOD_S_MIN:g} s to {PERIOD_S_MAX:g} s, not "
                f"{self.period_s}"
            )
        if len(self.segments) > SEGMENTS_MAX:
            raise InvalidRequestError(
                f"a demand trace has at most {SEGMENTS_MAX} segments, not {len(self.segments)}: "
                "merge neighbouring ones"
            )
        if not (math.isfinite(self.jitter_s) and self.jitter_s >= 0):
            raise InvalidRequestError(f"a demand trace's jitter is at least 0, not {self.jitter_s}")
        end = 0.0
        for segment in self.segments:
            fields = (segment.offset_s, segment.duration_s, segment.slack_s)
            if not all(math.isfinite(field) and field >= 0 for field in fields):
                raise InvalidRequestError(f"a segment's times are finite and at least 0: {segment}")
            if segment.offset_s < end - 1e-9:
                raise InvalidRequestError(
                    f"segments overlap or are out of order at {segment.offset_s} s: sort and merge"
                )
            end = segment.offset_s + segment.duration_s
        if not self.segments or end > self.period_s + 1e-9:
            raise InvalidRequestError(
                f"the segments of a demand trace lie inside its period of {self.period_s} s, and "
                f"there is at least one; these end at {end} s"
            )

    @property
    def busy_s(self) -> float:
        """Seconds of one cycle in which the group is needed."""
        return sum(segment.duration_s for segment in self.segments)

    @property
    def duty(self) -> float:
        """Part of the cycle in which the group is needed, 0 to 1."""
        return self.busy_s / self.period_s

    @property
    def has_critical(self) -> bool:
        """Whether a segment is critical."""
        return any(segment.is_critical for segment in self.segments)


@dataclass(slots=True, kw_only=True)
class ShapeDemand:
    """Measured demand of deployments of one shape."""

    profiles: dict[int, DemandTrace] = field(default_factory=dict)
    """The newest profiles by the number of the job, oldest first."""
    prior: DemandTrace | None = None
    """Plans those that are not measured yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """A demand trace on the ring: `cycles` repetitions, the first segment's clock at `shift`.

    Segment edges are rounded outward to whole slots in every cycle, except for `EDGE_PARTS`, so
    that what fits on the ring fits in time, to a few microseconds.
    """

    horizon_slots: int
    cycles: int
    """Repetitions in the ring."""
    shift: float
    """Slots from the ring's start to the start of a cycle; below the period."""
    segments: tuple[tuple[float, float, int], ...]
    """(offset, duration, weight) in slots."""
    turns: dict[int, int] = field(default_factory=dict, compare=False, repr=False)
    """Cache of `period_mask`: the slots of a segment that starts with the ring's first cycle, by
    the segment's length in parts of a slot. All shifts share it."""

    @property
    def period(self) -> float:
        """Slots of one cycle, H / cycles: commensurate with the ring, perhaps fractional."""
        return self.horizon_slots / self.cycles

    @property
    def is_always(self) -> bool:
        """One segment takes the whole ring."""
        longest = 0.0
        for _, duration, _ in self.segments:
            longest = max(longest, duration)
        return longest >= self.horizon_slots / self.cycles

    def at(self, shift: float) -> "Footprint":
        """The same demand at another shift."""
        rounded = round(shift % self.period * SLOT_PARTS) / SLOT_PARTS
        return Footprint(
            horizon_slots=self.horizon_slots,
            cycles=self.cycles,
            shift=rounded if rounded < self.period else 0.0,
            segments=self.segments,
            turns=self.turns,
        )

    def busy(self) -> int:
        """The busy slots of the ring, as one bit each: a union or overlap of two rings is then one
        integer operation, which takes about a microsecond."""
        bits, turn = self.period_mask()
        return repeated(bits, turn, self.horizon_slots // turn)

    def period_mask(self) -> tuple[int, int]:
        """(bits, slots): the pattern that the ring repeats, one bit per busy slot, and its length.

        Let H / cycles be T / k in lowest terms. The pattern is T slots long and has k cycles,
        which start at k different distances from the edge of a slot. Another shift only rotates
        the pattern. So the slots of a segment of one length are computed once, for a segment that
        begins with the ring's first cycle, and are rotated for every other offset and shift.
        """
        if self.is_always:
            return 1, 1
        parts, turn = self._lowest_terms()
        found = 0
        for offset, duration, _ in self.segments:
            low, high = self._edges(offset, duration)
            first, last = low * parts // SLOT_PARTS, -(-high * parts // SLOT_PARTS)
            length = last - first
            if length >= turn:
                return 1, 1
            bits = self.turns.get(length)
            if bits is None:
                if len(self.turns) >= TURNS_MAX:
                    self.turns.clear()
                bits = self.turns[length] = _turn_of(parts, turn, length)
            alike = first * pow(turn, -1, parts) % parts if parts > 1 else 0
            by = (first - alike * turn) // parts % turn
            found |= bits << by
        # Bits beyond the end of the pattern continue at its start.
        return (found | found >> turn) & ((1 << turn) - 1), turn

    def _lowest_terms(self) -> tuple[int, int]:
        """(k, T): a cycle takes T / k slots, in lowest terms."""
        common = math.gcd(self.horizon_slots, self.cycles)
        return self.cycles // common, self.horizon_slots // common

    def _edges(self, offset: float, duration: float) -> tuple[int, int]:
        """First and last part of the ring's first cycle that a segment takes, without those that
        take no slot."""
        low, high = self.shift + offset, self.shift + (offset + duration)
        return round(low * SLOT_PARTS) + EDGE_PARTS, round(high * SLOT_PARTS) - EDGE_PARTS

    def intervals(self) -> NDArray[np.int64]:
        """(start, stop, weight) of every cycle's segments: [cycles * segments, 3] int64.

        Starts lie on the ring; a stop may pass its end and then wraps.
        """
        if self.is_always:
            weight = max(weight for _, _, weight in self.segments)
            return np.array([[0, self.horizon_slots, weight]], dtype=np.int64)
        parts, turn = self._lowest_terms()
        # A cycle begins at slot `whole` and `rest` / `parts` of a slot: the products stay far below
        # 64 bits.
        whole, rest = np.divmod(np.arange(self.cycles) * turn, parts)
        rest *= SLOT_PARTS
        unit = parts * SLOT_PARTS
        found = np.empty((self.cycles, len(self.segments), 3), dtype=np.int64)
        for column, (offset, duration, weight) in enumerate(self.segments):
            low, high = self._edges(offset, duration)
            found[:, column, 0] = whole + (rest + low * parts) // unit
            found[:, column, 1] = whole - -(rest + high * parts) // unit
            found[:, column, 2] = weight
        rows = found.reshape(-1, 3)
        turns = rows[:, 0] // self.horizon_slots * self.horizon_slots
        rows[:, 0] -= turns
        rows[:, 1] -= turns
        return rows


def repeated(bits: int, slots: int, times: int) -> int:
    """A pattern of so many slots, repeated so many times."""
    found = at = 0
    while times > 1:
        if times & 1:
            found |= bits << at
            at += slots
        bits |= bits << slots
        slots += slots
        times >>= 1
    return found | bits << at


def _bits(slots: NDArray[np.bool_]) -> int:
    """One bit for each slot of `slots`, the first slot in the lowest bit."""
    return int.from_bytes(np.packbits(slots, bitorder="little").tobytes(), "little")


def _turn_of(parts: int, turn: int, length: int) -> int:
    """The busy slots of a pattern of `turn` slots for a segment of `length` / `parts` slots that
    begins with the first of the pattern's `parts` cycles."""
    if parts == 1:
        return (1 << length) - 1
    slots = np.zeros(turn, dtype=np.bool_)
    for start in range(0, parts * turn, turn):
        stop = -(-(start + length) // parts)
        slots[start // parts : stop] = True
        if stop > turn:
            slots[: stop - turn] = True
    return _bits(slots)


def commensurate(period_s: float, horizon_slots: int, tolerance: float) -> int:
    """Number of cycles of this period in the ring.

    round(H / P) makes P' = H / k close on itself. Within `tolerance` (a part of the period) a `k`
    that divides H is preferred: then P' is a whole number of slots, every cycle looks the same, and
    jobs of similar periods get equal or harmonic ones, without which no two footprints of a ring
    can stay apart.
    """
    ideal = horizon_slots / max(period_s, min(SHORTEST_PLANNED_S, horizon_slots))
    nearest = max(1, min(horizon_slots, round(ideal)))
    if horizon_slots % nearest == 0:
        return nearest
    low = max(1, math.ceil(ideal / (1.0 + tolerance)))
    high = min(horizon_slots, math.floor(ideal / max(1e-9, 1.0 - tolerance)))
    divisors = [k for k in range(low, high + 1) if horizon_slots % k == 0]
    return min(divisors, key=lambda k: (abs(k - ideal), k), default=nearest)


def project(trace: DemandTrace, horizon_slots: int, tolerance: float = 0.0) -> Footprint:
    """The footprint of `trace` at shift 0, its offsets stretched to the commensurate period."""
    cycles = commensurate(trace.period_s, horizon_slots, tolerance)
    period = horizon_slots / cycles
    if trace.period_s < SHORTEST_PLANNED_S or cycles * len(trace.segments) > INTERVALS_MAX:
        block = (0.0, _in_parts(trace.duty * period, period), CRITICAL_WEIGHT)
        return Footprint(horizon_slots=horizon_slots, cycles=cycles, shift=0.0, segments=(block,))
    stretch = period / trace.period_s
    segments = []
    for segment in trace.segments:
        weight = CRITICAL_WEIGHT if segment.is_critical else 1
        # Gaps stretch with the period, work does not; a segment is cut at the end of the cycle.
        offset = _in_parts(segment.offset_s * stretch, period)
        segments.append((offset, _in_parts(segment.duration_s, period), weight))
    return Footprint(
        horizon_slots=horizon_slots, cycles=cycles, shift=0.0, segments=tuple(segments)
    )


def _in_parts(slots: float, period: float) -> float:
    """`slots` in whole parts of a slot, and no more than the cycle has."""
    return period if slots >= period else round(slots * SLOT_PARTS) / SLOT_PARTS


def whole_ring(horizon_slots: int) -> Footprint:
    """The footprint of a deployment that is always busy: a rollout, an unprofiled job."""
    return Footprint(
        horizon_slots=horizon_slots,
        cycles=1,
        shift=0.0,
        segments=((0.0, float(horizon_slots), CRITICAL_WEIGHT),),
    )
