"""Fault points: named steps of a move at which tests kill the daemon. Unused in production."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable

from plexrl.errors import InvalidRequestError

POINTS = frozenset(
    {
        *("put.claimed", "put.reserved", "put.copied", "put.header", "put.named", "put.dropped"),
        *("spill.block", "spill.data", "spill.rename", "spill.header", "spill.named", "spill.done"),
        *("promote.block", "promote.data", "promote.header", "promote.named"),
        *("arrive.block", "load.half", "load.block", "drop.unlinked", "drop.object"),
    }
)


class FaultPoints:
    """Kills this process at a fault point: `name` on the first visit, `name:3` on the third."""

    def __init__(self, named: Iterable[str] = ()) -> None:
        """Raises InvalidRequestError: a fault point is unknown."""
        self._left: Counter[str] = Counter()
        self._lock = threading.Lock()
        for entry in named:
            name, _, count = entry.partition(":")
            if name not in POINTS or not (count or "1").isdecimal():
                raise InvalidRequestError(
                    f"unknown fault point {entry!r}: use one of {sorted(POINTS)}"
                )
            self._left[name] = int(count or 1)

    def reach(self, name: str) -> None:
        """Record a visit of a fault point; kills the process if it is configured for this visit."""
        assert name in POINTS, name
        if not self._left:
            return
        with self._lock:
            if name not in self._left:
                return
            self._left[name] -= 1
            if self._left[name] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
