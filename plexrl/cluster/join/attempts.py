"""Failed attempts to join, by client address, so that nobody can try many secrets."""

from collections import OrderedDict, deque

from plexrl.errors import OverloadedError

FAILURES_MAX = 10
WINDOW_S = 60.0
ADDRESSES_MAX = 4096
"""Addresses that are remembered; beyond it the oldest is forgotten."""


class FailedAttempts:
    """Bounds the failures of each address within a sliding window. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str, now: float) -> None:
        """Refuse an address with too many recent failures.

        Raises:
            OverloadedError: it must wait.
        """
        failures = self._failures.get(address)
        if failures is None or len(failures) < FAILURES_MAX:
            return
        wait_s = failures[0] + WINDOW_S - now
        if wait_s > 0:
            raise OverloadedError(
                f"{FAILURES_MAX} attempts to join from {address} failed within {WINDOW_S:g} s: "
                f"try again in {wait_s:.0f} s, with a new token of `plexrl node token`",
                retry_after_s=wait_s,
            )

    def add(self, address: str, now: float) -> None:
        """Record a failure."""
        failures = self._failures.setdefault(address, deque(maxlen=FAILURES_MAX))
        failures.append(now)
        self._failures.move_to_end(address)
        while len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
