"""Requests without a valid API key: counted, reported, and limited for each client network.

A network may send `burst` of them at once and `per_s` a second after that. Beyond it, keys that the
router does not know yet are refused unseen with 429, until the network has been quiet for a moment.
Keys that the router has seen to be valid pass always, so that somebody who guesses behind a proxy
does not lock out those who work behind it. Pure.
"""

from collections import OrderedDict

from plexrl.errors import OverloadedError

NETWORKS_MAX = 10_000
"""Networks that are remembered; the one that was seen longest ago is forgotten first."""
QUIET_S = 60.0
"""Shortest time between two reports."""


class RefusedKeys:
    """The refused requests of one router."""

    def __init__(self, *, burst: int, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self.count = 0
        """Requests refused with 401."""
        self.limited_count = 0
        """Requests refused with 429."""
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By network: refusals that count against it, and the time of that count."""
        self._reported_at = -QUIET_S
        self._reported = 0

    def check(self, network: str, now: float) -> None:
        """Refuse to look up a key for a network that has sent too many wrong ones.

        Raises:
            OverloadedError: it has; the error says when to try again.
        """
        excess = self._spent_now(network, now) + 1 - self._burst
        if excess > 0:
            self.limited_count += 1
            raise OverloadedError(
                "too many requests without a valid API key came from your address: check "
                "PLEXRL_API_KEY, and try again later",
                retry_after_s=max(1.0, excess / self._per_s),
            )

    def add(self, network: str, now: float) -> str | None:
        """Record a request that was refused with 401; returns a line for the log, if one is due."""
        self.count += 1
        self._spent[network] = (self._spent_now(network, now) + 1, now)
        self._spent.move_to_end(network)
        while len(self._spent) > NETWORKS_MAX:
            self._spent.popitem(last=False)
        if now - self._reported_at < QUIET_S:
            return None
        total = self.count + self.limited_count
        text = (
            f"{total - self._reported} requests without a valid API key since the last report, the "
            f"newest from {network or 'this machine'}"
        )
        self._reported, self._reported_at = total, now
        return text

    def _spent_now(self, network: str, now: float) -> float:
        spent, at = self._spent.get(network, (0.0, now))
        return max(0.0, spent - (now - at) * self._per_s)
