"""Counts of the daemon's moves and refusals since its start."""

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

SECONDS_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
BYTES_BOUNDS = tuple(float(1 << shift) for shift in range(12, 41, 4))
"""4 KiB to 1 TiB, in steps of 16."""


@dataclass(slots=True)
class CounterHistogram:
    """Counts of values per bucket; the last bucket has no upper bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveKind:
    """Labels of a move."""

    request: str
    outcome: str
    """`ok`, or the code of the error."""
    tier: str
    """Tier that the move read or wrote; empty if the move failed before."""


@dataclass(slots=True)
class MoveCounters:
    """Durations and sizes of the moves of one kind."""

    seconds: CounterHistogram = field(default_factory=lambda: CounterHistogram(SECONDS_BOUNDS))
    nbytes: CounterHistogram = field(default_factory=lambda: CounterHistogram(BYTES_BOUNDS))


class Counters:
    """Counts moves and refusals. Thread-safe. Other requests are not counted, so they cost
    nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moves: dict[MoveKind, MoveCounters] = {}
        self._refused: Counter[str] = Counter()
        self.prefetched_bytes = 0
        """Bytes that loads found on their device."""

    def count_move(
        self, kind: MoveKind, *, nbytes: int, seconds: float, prefetched_bytes: int = 0
    ) -> None:
        """Count a move that has ended, successful or not. `prefetched_bytes`: of these bytes, those
        that were copied before."""
        with self._lock:
            counters = self._moves.setdefault(kind, MoveCounters())
            counters.seconds.add(seconds)
            counters.nbytes.add(nbytes)
            self.prefetched_bytes += prefetched_bytes

    def count_refusal(self, code: str) -> None:
        """Count a refused request by its error code."""
        with self._lock:
            self._refused[code] += 1

    def moves(self) -> dict[MoveKind, tuple[tuple[list[int], float], tuple[list[int], float]]]:
        """Counts and sum of seconds, counts and sum of bytes, per kind of move."""
        with self._lock:
            return {
                kind: (
                    (list(counters.seconds.counts), counters.seconds.total),
                    (list(counters.nbytes.counts), counters.nbytes.total),
                )
                for kind, counters in self._moves.items()
            }

    def refusals(self) -> dict[str, int]:
        """Refused requests per error code."""
        with self._lock:
            return dict(self._refused)
