"""Moves take turns: so many at once, so many in line, and the next one is told to come back.

Laws:

- Tenants that wait take turns; of one tenant, who came first is first.
- A move that is refused has changed nothing; nor has one whose client left while it waited.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from plexrl.errors import ConnectionLostError, OverloadedError

LOOK_S = 0.5
"""A client whose move waits is looked for so often."""
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


@dataclass(slots=True, eq=False)
class _Waiting:
    """A move in line."""

    tenant: str
    turn: threading.Event = field(default_factory=threading.Event)


class MoveLine:
    """Thread-safe."""

    def __init__(self, moves_max: int, waiting_max: int) -> None:
        self._moves_max = moves_max
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._running: list[Move] = []
        self._taken = 0
        """Places that are running moves' or on their way to the first in line."""
        self._lines: dict[str, deque[_Waiting]] = {}
        """By tenant, whose turn is next first; a tenant that nobody waits of is not there."""
        self._mean_s = 0.0

    @contextmanager
    def place(
        self,
        kind: str,
        who: str,
        tenant: str = "",
        is_there: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Wait for a place and keep it for one move, as long as `is_there` says that whoever asked
        still waits for the answer.

        Raises:
            OverloadedError: the line is full.
            ConnectionLostError: nobody waits for the answer.
        """
        self._enter(tenant, is_there)
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
            return self._count()

    def _enter(self, tenant: str, is_there: Callable[[], bool]) -> None:
        with self._lock:
            if self._taken < self._moves_max:
                self._taken += 1
                return
            count = self._count()
            if count >= self._waiting_max:
                ahead = (count + 1) / self._moves_max
                raise OverloadedError(
                    f"{len(self._running)} moves are under way and {count} wait already: "
                    "try again, or raise moves_waiting_max",
                    retry_after_s=min(max(0.1, ahead * self._mean_s), RETRY_S_MAX),
                )
            mine = _Waiting(tenant)
            self._lines.setdefault(tenant, deque()).append(mine)
        while not mine.turn.wait(LOOK_S):
            if not is_there():
                self._give_up(mine)

    def _give_up(self, mine: _Waiting) -> None:
        """Take a move out of the line, unless its turn has come.

        Raises:
            ConnectionLostError: it is out.
        """
        with self._lock:
            if mine.turn.is_set():
                return
            line = self._lines[mine.tenant]
            line.remove(mine)
            if not line:
                del self._lines[mine.tenant]
        raise ConnectionLostError("the client left while its move waited for its turn")

    def _leave(self, move: Move) -> None:
        with self._lock:
            self._running.remove(move)
            taken_s = time.monotonic() - move.began
            self._mean_s += _WEIGHT * (taken_s - self._mean_s) if self._mean_s else taken_s
            if not self._lines:
                self._taken -= 1
                return
            # The place is handed on, so that nobody who comes now is faster.
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            line.popleft().turn.set()
            if line:
                # Behind the other tenants again.
                self._lines[tenant] = line

    def _count(self) -> int:
        return sum(len(line) for line in self._lines.values())
