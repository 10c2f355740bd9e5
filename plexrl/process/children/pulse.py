"""A pulse: a process shows the process that watches it that it makes progress.

A stopped or hung process keeps its sockets, and the kernel accepts connections for it. So the
process itself sends a beat each second: from its event loop, or from a thread that first takes the
locks that its work needs. Long work on other threads does not stop the beats; such work has
deadlines of its own (`plexrl.scheduler.operations.deadlines`).

A process that has never beaten is not judged: it may be one that sends no beats.
"""

import os
import select
import sys
from collections.abc import Callable, MutableMapping

from plexrl.errors import InvalidRequestError

PULSE = "PLEXRL_PULSE"
"""Environment variable: this process is to beat on its standard output."""
BEAT_S = 1.0
LOOK_S = 0.25
"""Longest pause between two looks of a watcher."""
BEAT = b"\n"
"""A beat on standard output: an empty line."""
STUCK_S = 60.0
"""Default silence after which a process is replaced: far longer than a busy machine delays a beat,
and than a short stop of a process, which it survives."""
STUCK_RANGE = (3 * BEAT_S, 86_400.0)
NAMED_PART = 0.25
"""After this part of that time, and two beats at least, a silent process is named as a
condition."""


class Pulse:
    """How long a process has been silent. Time is an argument."""

    def __init__(self, stuck_s: float) -> None:
        """`stuck_s`: silence after which it is stuck; 0: never."""
        self._stuck_s = stuck_s
        self._has_beaten = False
        self._silent_s = 0.0
        self._looked_at: float | None = None

    def beat(self) -> None:
        """A beat has arrived."""
        self._has_beaten = True
        self._silent_s = 0.0

    def look(self, now: float) -> None:
        """Count the time since the last look as silence. A watcher that did not run itself for a
        while, as on a suspended machine, counts two beats: the beats wait to be read."""
        if self._looked_at is not None:
            self._silent_s += min(now - self._looked_at, 2 * BEAT_S)
        self._looked_at = now

    @property
    def silent_s(self) -> float:
        """Seconds without a beat."""
        return self._silent_s if self._has_beaten else 0.0

    @property
    def is_late(self) -> bool:
        """Whether it has been silent for so long that people should know."""
        named_s = max(NAMED_PART * self._stuck_s, 2 * BEAT_S)
        return self._stuck_s > 0.0 and self.silent_s > named_s

    @property
    def is_stuck(self) -> bool:
        """Whether it is to be replaced."""
        return self._stuck_s > 0.0 and self.silent_s > self._stuck_s


def check_stuck_s(name: str, stuck_s: float) -> None:
    """Refuse a silence that is neither 0, which is off, nor in `STUCK_RANGE`.

    Raises:
        InvalidRequestError: it is not.
    """
    least, most = STUCK_RANGE
    if stuck_s != 0.0 and not least <= stuck_s <= most:
        raise InvalidRequestError(
            f"{name} is {stuck_s}: it must be 0 (never), or at least {least:g} and at most {most:g}"
        )


def must_beat(environment: MutableMapping[str, str]) -> bool:
    """Whether this process is to beat. The variable is removed: it does not apply to children."""
    return bool(environment.pop(PULSE, ""))


async def beat(works: Callable[[], object] | None = None) -> None:
    """Beat on standard output until cancelled. `works`, called on a thread before each beat but
    the first, returns only if the work on this process's other threads makes progress."""
    import asyncio  # The command line imports this module for the bounds of an option.

    while True:
        # A watcher that does not read must not block this process; one byte fits, or nothing.
        if select.select([], [sys.stdout.fileno()], [], 0)[1]:
            os.write(sys.stdout.fileno(), BEAT)
        await asyncio.sleep(BEAT_S)
        if works is not None:
            await asyncio.to_thread(works)
