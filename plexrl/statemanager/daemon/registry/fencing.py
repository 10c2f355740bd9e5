"""Fencing: a previous holder of a group's lock can no longer move state (PlexRL §5.2.3).

The highest token of each group is stored in the host tier's directory. It survives the daemon until
the machine reboots, which is as long as a late message can survive.
"""

import threading
from pathlib import Path

import msgspec

from plexrl.errors import InvalidRequestError, StaleTokenError
from plexrl.statemanager.store.disk_space import replace_file

LEAP_MAX = 1 << 20
"""Largest increase between two tokens of a group. The client supplies the token, and a token far
beyond all grants would lock out every later holder."""


class Fencing:
    """Highest token of each group. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._highest: dict[str, int] = {}
        if path.exists():
            self._highest = msgspec.json.decode(path.read_bytes(), type=dict[str, int])

    def admit(self, group: str, token: int) -> None:
        """Accept `token` and record it.

        Raises:
            StaleTokenError: a higher token was accepted before.
            InvalidRequestError: the token is higher than any scheduler can have reached.
            StateTierFullError: the file system is full; nothing has changed.
        """
        with self._lock:
            highest = self._highest.get(group, 0)
            _check(group, token, highest, highest)
            if token > highest:
                known = {**self._highest, group: token}
                replace_file(self._path, msgspec.json.encode(known))
                self._highest = known

    def check(self, group: str, token: int, since: int) -> None:
        """Refuse a token that was granted before `since`, which is no higher than the newest, and
        record nothing. Raises `StaleTokenError` and `InvalidRequestError` as `admit`."""
        with self._lock:
            _check(group, token, since, self._highest.get(group, 0))


def _check(group: str, token: int, least: int, highest: int) -> None:
    if highest and token > highest + LEAP_MAX:
        raise InvalidRequestError(
            f"token {token} of group {group!r} is far beyond the last one, {highest}: use the "
            "token that the scheduler granted",
            token=token,
            highest=highest,
        )
    if token < least:
        raise StaleTokenError(
            f"token {token} of group {group!r} is stale, {least} has been granted since: another "
            "worker holds the lock, request it again",
            token=token,
            highest=least,
        )
