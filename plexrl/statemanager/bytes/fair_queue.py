"""Bounded queue of moves, fair between tenants.

Invariants:

- Waiting tenants are served round-robin; moves of one tenant are first-in, first-out.
- A move that is refused, or whose client leaves while it waits, has changed nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from plexrl.errors import ConnectionLostError, OverloadedError

LOOK_S = 0.5
"""Interval of checks that a waiting move's client is still connected."""
RETRY_S_MAX = 30.0
_WEIGHT = 0.2
"""Weight of the newest move in the mean duration."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueuedMove:
    """A running move."""

    kind: str
    who: str
    began: float
    """Start, on the monotonic clock."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A waiting move."""

    tenant: str
    turn: threading.Event = field(default_factory=threading.Event)


class FairQueue:
    """At most `moves_max` moves run and `waiting_max` wait. Thread-safe."""

    def __init__(self, moves_max: int, waiting_max: int) -> None:
        self._moves_max = moves_max
        self._waiting_max = waiting_max
        self._lock = threading.Lock()
        self._running: list[QueuedMove] = []
        self._taken = 0
        """Slots in use by running moves, or granted to a waiting move."""
        self._queues: dict[str, deque[_Waiting]] = {}
        """By tenant, in the order of their turns; only tenants with waiting moves."""
        self._mean_s = 0.0

    @contextmanager
    def slot(
        self,
        kind: str,
        who: str,
        tenant: str = "",
        is_there: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Wait for a slot and hold it for one move; `is_there` says whether the client is still
        connected.

        Raises:
            OverloadedError: the queue is full.
            ConnectionLostError: the client left while its move waited.
        """
        self._enter(tenant, is_there)
        move = QueuedMove(kind=kind, who=who, began=time.monotonic())
        with self._lock:
            self._running.append(move)
        try:
            yield
        finally:
            self._leave(move)

    def running(self) -> list[QueuedMove]:
        """The running moves, the oldest first."""
        with self._lock:
            return list(self._running)

    def waiting(self) -> int:
        """Number of waiting moves."""
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
                    f"{len(self._running)} moves run and {count} wait already: "
                    "try again, or raise moves_waiting_max",
                    retry_after_s=min(max(0.1, ahead * self._mean_s), RETRY_S_MAX),
                )
            mine = _Waiting(tenant)
            self._queues.setdefault(tenant, deque()).append(mine)
        while not mine.turn.wait(LOOK_S):
            if not is_there():
                self._give_up(mine)

    def _give_up(self, mine: _Waiting) -> None:
        """Remove a waiting move, unless its turn has come.

        Raises:
            ConnectionLostError: it was removed.
        """
        with self._lock:
            if mine.turn.is_set():
                return
            queue = self._queues[mine.tenant]
            queue.remove(mine)
            if not queue:
                del self._queues[mine.tenant]
        raise ConnectionLostError("the client left while its move waited for its turn")

    def _leave(self, move: QueuedMove) -> None:
        with self._lock:
            self._running.remove(move)
            taken_s = time.monotonic() - move.began
            self._mean_s += _WEIGHT * (taken_s - self._mean_s) if self._mean_s else taken_s
            if not self._queues:
                self._taken -= 1
                return
            # The slot passes to the next waiting move, so that no new move overtakes it.
            tenant = next(iter(self._queues))
            queue = self._queues.pop(tenant)
            queue.popleft().turn.set()
            if queue:
                # The tenant goes behind the others.
                self._queues[tenant] = queue

    def _count(self) -> int:
        return sum(len(queue) for queue in self._queues.values())
