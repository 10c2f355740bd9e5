"""Makes work last as long as it would on the modelled GPU, by sleeping."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LATE_S_MAX = 0.05
"""Lateness that later sleeps make up for. More is the fault of a busy machine, not of sleeps that
end late, and would make the steps after it too short."""


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
        seconds that it was to last."""
        wanted_s = modelled_s * self._scale
        left_s = wanted_s - (self._clock() - since) - self._late_s
        if left_s > 0.0:
            self._sleep(left_s)
        late_s = self._late_s + (self._clock() - since) - wanted_s
        self._late_s = min(max(late_s, 0.0), LATE_S_MAX)
        return wanted_s

    @contextmanager
    def lasts(self, modelled_s: float) -> Iterator[None]:
        """The block lasts its modelled time. A block that raises does not."""
        since = self.now()
        yield
        self.rest(since, modelled_s)

    def modelled_s(self, real_s: float) -> float:
        """The modelled time that passes in `real_s`."""
        return real_s / self._scale
