"""Choice between delta and full pulls by their measured speed. Pure.

Comparing two versions takes a CPU core about a second for each GB, so a delta pays off over a slow
or busy link, but not over a quick idle one. A link's bandwidth is unknown, so it is measured.
"""

from collections import deque

TRIALS = 2
"""Pulls of each mode before one is preferred; the better counts. The first pull maps memory, and
other work may delay any."""
TRIED_AGAIN_AFTER = 16
"""Number of pulls after which the slower mode is tried again."""


class DeltaPace:
    """Measured speeds of one target's pulls."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[bool, deque[float]] = {
            is_delta: deque(maxlen=TRIALS) for is_delta in (True, False)
        }
        self._preferred = 0

    def prefers_delta(self) -> bool:
        """Whether the next pull should be a delta."""
        for is_delta, speeds in self._bytes_per_s.items():
            if len(speeds) < TRIALS:
                return is_delta
        is_quicker = max(self._bytes_per_s[True]) >= max(self._bytes_per_s[False])
        self._preferred += 1
        is_trial = self._preferred % TRIED_AGAIN_AFTER == 0
        return is_quicker != is_trial

    def took(self, nbytes: int, seconds: float, *, is_delta: bool) -> None:
        """Record the duration of a pull of `nbytes` wanted bytes."""
        self._bytes_per_s[is_delta].append(nbytes / max(seconds, 1e-9))
