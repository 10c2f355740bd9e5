"""Fencing: a former holder of a group's lock can move nothing any more (PlexRL §5.2.3).

The highest token seen of each group is kept in the host tier's directory, so it outlives the daemon
as long as a late message could: the machine's boot.
"""

import threading
from pathlib import Path

import msgspec

from plexrl.errors import StaleTokenError


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
        """
        with self._lock:
            highest = self._highest.get(group, 0)
            if token < highest:
                raise StaleTokenError(
                    f"token {token} of group {group!r} is stale, {highest} has been granted since: "
                    "the lock is another's, ask the scheduler again",
                    token=token,
                    highest=highest,
                )
            if token > highest:
                self._highest[group] = token
                self._write()

    def _write(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self._highest))
        part.rename(self._path)
