"""A file that records the restarts of a cluster's parts. The supervisor writes it, and routers read
it."""

import logging
import time
from pathlib import Path

import msgspec

from plexrl.process.folders.operator_key import write_private

LOG = logging.getLogger(__name__)


class PartHistory(msgspec.Struct, kw_only=True):
    """Restarts of one part since the cluster started; times in seconds since the epoch."""

    restarts: int = 0
    last_restart_at: float | None = None
    down_since: float | None = None
    """Absent while the part runs."""
    stuck_since: float | None = None
    """Absent while the part answers."""


class PartRecord:
    """Counts the restarts of each part. Parts that were always well are not recorded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, PartHistory] = {}

    def ended(self, part: str) -> None:
        """Record that a part ended unexpectedly."""
        history = self._parts.setdefault(part, PartHistory())
        if history.down_since is None:
            history.down_since = time.time()
            history.stuck_since = None
            self._write()

    def silent(self, part: str, silent_s: float) -> None:
        """Record that a part runs and has not answered for so long."""
        history = self._parts.setdefault(part, PartHistory())
        if history.stuck_since is None:
            history.stuck_since = time.time() - silent_s
            self._write()

    def answers(self, part: str) -> None:
        """Record that a part answers again."""
        history = self._parts.get(part)
        if history is not None and history.stuck_since is not None:
            history.stuck_since = None
            self._write()

    def restarted(self, part: str) -> None:
        """Record that a part serves again."""
        history = self._parts.setdefault(part, PartHistory())
        history.restarts += 1
        history.last_restart_at = time.time()
        history.down_since = None
        self._write()

    def _write(self) -> None:
        try:
            write_private(self._path, msgspec.json.encode(self._parts).decode())
        except OSError as error:
            LOG.warning("cannot write the record of restarts: %s", error)


def read_parts(path: Path) -> dict[str, PartHistory]:
    """The parts in a `PartRecord`'s file; empty if all were always well, or there is no file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, PartHistory])
    except (OSError, msgspec.MsgspecError):
        return {}
