"""Whether a delta is quicker than all bytes, by how both went lately. Pure.

Comparing two versions takes a processor about a second for each GB (of bytes as they arrive), so a
delta pays over a link that is slower than that, or busy with others, and not over a quick idle one.
What a link carries is not known before, so it is measured.
"""

TRIED_AGAIN_AFTER = 16
"""Pulls, after which what was slower is tried again: steps and networks change."""


class DeltaPace:
    """Of one target and its sources."""

    def __init__(self) -> None:
        self._bytes_per_s: dict[bool, float] = {}
        self._passed_over = 0

    def prefers_delta(self) -> bool:
        """Whether the next pull had better be a delta."""
        full, delta = self._bytes_per_s.get(False), self._bytes_per_s.get(True)
        if full is None or delta is None or delta >= full:
            return True
        self._passed_over += 1
        return self._passed_over % TRIED_AGAIN_AFTER == 0

    def took(self, nbytes: int, seconds: float, *, is_delta: bool) -> None:
        """A pull of so many wanted bytes was made so."""
        now = nbytes / max(seconds, 1e-9)
        before = self._bytes_per_s.get(is_delta, now)
        self._bytes_per_s[is_delta] = (before + now) / 2
