"""What the daemon has done since its start, counted. Read by
`plexrl.statemanager.observe.metrics`."""

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

SECONDS_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
BYTES_BOUNDS = tuple(float(1 << shift) for shift in range(12, 41, 4))
"""4 KiB to 1 TiB, in steps of 16."""


@dataclass(slots=True)
class Histogram:
    """Counts of values up to each bound, and beyond the last."""

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
    """What moves are told apart by."""

    request: str
    outcome: str
    """`ok`, or the code of the error."""
    tier: str
    """The other end of the move; empty where it did not come to one."""


@dataclass(slots=True)
class MoveTally:
    """Moves of one kind."""

    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))
    moved: Histogram = field(default_factory=lambda: Histogram(BYTES_BOUNDS))


class Tally:
    """Thread-safe. Counts moves and refusals only, so that other requests cost nothing here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moves: dict[MoveKind, MoveTally] = {}
        self._refused: Counter[str] = Counter()

    def moved(self, kind: MoveKind, *, nbytes: int, seconds: float) -> None:
        """Count a move that has ended, however it did."""
        with self._lock:
            tally = self._moves.setdefault(kind, MoveTally())
            tally.seconds.add(seconds)
            tally.moved.add(nbytes)

    def refused(self, code: str) -> None:
        """Count a request that was refused, by its error's code."""
        with self._lock:
            self._refused[code] += 1

    def moves(self) -> dict[MoveKind, tuple[tuple[list[int], float], tuple[list[int], float]]]:
        """By kind: counts and sum of seconds, counts and sum of bytes."""
        with self._lock:
            return {
                kind: (
                    (list(tally.seconds.counts), tally.seconds.total),
                    (list(tally.moved.counts), tally.moved.total),
                )
                for kind, tally in self._moves.items()
            }

    def refusals(self) -> dict[str, int]:
        """By the error's code."""
        with self._lock:
            return dict(self._refused)
