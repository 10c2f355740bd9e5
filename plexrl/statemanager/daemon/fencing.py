"""Fencing: a former holder of a group's lock can move nothing any more (PlexRL §5.2.3).

The highest token seen of each group is kept in the host tier's directory, so it outlives the daemon
as long as a late message could: the machine's boot.
"""

import threading
from pathlib import Path

import msgspec

from plexrl.errors import InvalidRequestError, StaleTokenError
from plexrl.statemanager.store.disk_space import replace_file

LEAP_MAX = 1 << 20
"""Grants of a group between two that this node hears of. A token is the client's word: one beyond
any grant would shut all others out for good."""


class Fencing:
    """Highest token by group. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._highest: dict[str, int] = {}
        if path.exists():
            self._highest = msgspec.json.decode(path.read_bytes(), type=dict[str, int])

    def admit(self, group: str, token: int) -> None:
        """Note that `token` was seen.

        Raises:
            StaleTokenError: a higher one was seen before.
            InvalidRequestError: it is one that no scheduler can have come to.
            StateTierFullError: the file system has no room to note it; nothing has changed.
        """
        with self._lock:
            highest = self._highest.get(group, 0)
            if highest and token > highest + LEAP_MAX:
                raise InvalidRequestError(
                    f"token {token} of group {group!r} is far beyond the {highest} seen last: the "
                    "scheduler counts them one by one",
                    token=token,
                    highest=highest,
                )
            if token < highest:
                raise StaleTokenError(
                    f"token {token} of group {group!r} is stale, {highest} has been granted since: "
                    "the lock is another's, ask the scheduler again",
                    token=token,
                    highest=highest,
                )
            if token > highest:
                known = {**self._highest, group: token}
                replace_file(self._path, msgspec.json.encode(known))
                self._highest = known
