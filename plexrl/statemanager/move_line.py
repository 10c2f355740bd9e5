"""Moves take turns: so many at once, so many in line, and the next one is told to come back.

Laws:

- First come, first served.
- A move that is refused has changed nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from plexrl.errors import OverloadedError

RETRY_S_MAX = 30.0
_WEIGHT = 0.2
"""Of the newest move in the mean duration."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Move:
    """One that is under way."""

    kind: str
    who: str
    began: float
    """On the monotonic clock."""


class MoveLine:
    """Thread-safe."""

    def __init__(self, moves_max: int, waiting_max: int) -> None:
        self._moves_max = moves_max
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._running: list[Move] = []
        self._taken = 0
        """Places that are running moves' or on their way to the first in line."""
        self._line: deque[threading.Event] = deque()
        self._mean_s = 0.0

    @contextmanager
    def place(self, kind: str, who: str) -> Iterator[None]:
        """Wait for a place and keep it for one move.

        Raises:
            OverloadedError: the line is full.
        """
        self._enter()
        move = Move(kind=kind, who=who, began=time.monotonic())
        with self._lock:
            self._running.append(move)
        try:
            yield
        finally:
            self._leave(move)

    def running(self) -> list[Move]:
        """The moves under way, the oldest first."""
        with self._lock:
            return list(self._running)

    def waiting(self) -> int:
        """How many stand in line."""
        with self._lock:
            return len(self._line)

    def _enter(self) -> None:
        with self._lock:
            if self._taken < self._moves_max:
                self._taken += 1
                return
            if len(self._line) >= self._waiting_max:
                ahead = (len(self._line) + 1) / self._moves_max
                raise OverloadedError(
                    f"{len(self._running)} moves are under way and {len(self._line)} wait already: "
                    "try again, or raise moves_waiting_max",
                    retry_after_s=min(max(0.1, ahead * self._mean_s), RETRY_S_MAX),
                )
            turn = threading.Event()
            self._line.append(turn)
        turn.wait()

    def _leave(self, move: Move) -> None:
        with self._lock:
            self._running.remove(move)
            taken_s = time.monotonic() - move.began
            self._mean_s += _WEIGHT * (taken_s - self._mean_s) if self._mean_s else taken_s
            if self._line:
                # The place is handed on, so that nobody who comes now is faster.
                self._line.popleft().set()
            else:
                self._taken -= 1
