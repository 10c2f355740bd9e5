"""Choice between delta and full pulls by their measured speed. Pure.

Comparing two versions takes a CPU core about a second for each GB, so a delta pays off over a slow
or busy link, but not over a quick idle one. A link's bandwidth is unknown, so it is measured.
"""

TRIED_AGAIN_AFTER = 16
"""Number of pulls after which the slower mode is tried again."""


class DeltaPace:
    """Measured speeds of one target's pulls."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[bool, float] = {}
        self._passed_over = 0

    def prefers_delta(self) -> bool:
        """Whether the next pull should be a delta."""
        full, delta = self._bytes_per_s.get(False), self._bytes_per_s.get(True)
        if full is None or delta is None or delta >= full:
            return True
        self._passed_over += 1
        return self._passed_over % TRIED_AGAIN_AFTER == 0

    def took(self, nbytes: int, seconds: float, *, is_delta: bool) -> None:
        """Record the duration of a pull of `nbytes` wanted bytes."""
        now = nbytes / max(seconds, 1e-9)
        before = self._bytes_per_s.get(is_delta, now)
        self._bytes_per_s[is_delta] = (before + now) / 2
