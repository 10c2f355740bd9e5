"""Makes work last as long as it would on the modelled GPU, by sleeping."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LATE_S_MAX = 0.05
"""Lateness of sleeps that later sleeps make up for. More is the fault of a busy machine, and would
make the steps after it too short."""


class Pacer:
    """Sleeps for one worker. Real time is modelled time multiplied by the scale."""

    def __init__(
        self,
        scale: float,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scale = scale
        self._sleep, self._clock = sleep, clock
        self._late_s = 0.0

    def now(self) -> float:
        """The clock's time, for `rest`."""
        return self._clock()

    def rest(self, since: float, modelled_s: float) -> float:
        """Sleep until work that began at `since` has lasted its modelled time; returns the real
        seconds that it lasted.

        Sleeps end late, which later sleeps make up for. Work that takes longer than its modelled
        time is not made up for: it is a cost of the machine, which no later work pays.
        """
        began = self._clock()
        left_s = modelled_s * self._scale - (began - since)
        if left_s <= self._late_s:
            self._late_s -= max(left_s, 0.0)
            return began - since
        asked_s = left_s - self._late_s
        self._sleep(asked_s)
        ended = self._clock()
        self._late_s = min(max(ended - began - asked_s, 0.0), LATE_S_MAX)
        return ended - since

    @contextmanager
    def lasts(self, modelled_s: float) -> Iterator[None]:
        """The block lasts its modelled time. A block that raises does not."""
        since = self.now()
        yield
        self.rest(since, modelled_s)

    def modelled_s(self, real_s: float) -> float:
        """The modelled time that passes in `real_s`."""
        return real_s / self._scale
