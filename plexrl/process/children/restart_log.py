"""Which parts of a cluster ended and were started again: a file, written by whoever starts them and
read by the routers."""

import logging
import time
from pathlib import Path

import msgspec

from plexrl.process.folders.operator_key import write_private

LOG = logging.getLogger(__name__)


class PartHistory(msgspec.Struct, kw_only=True):
    """What became of one part since the cluster was started; times in seconds since the epoch."""

    restarts: int = 0
    last_restart_at: float | None = None
    down_since: float | None = None
    """Absent while it runs."""


class PartRecord:
    """Counts restarts, part by part; parts that never ended are not in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: dict[str, PartHistory] = {}

    def ended(self, part: str) -> None:
        """A part ended, though nobody asked it to."""
        history = self._parts.setdefault(part, PartHistory())
        if history.down_since is None:
            history.down_since = time.time()
            self._write()

    def restarted(self, part: str) -> None:
        """It serves again."""
        history = self._parts.setdefault(part, PartHistory())
        history.restarts += 1
        history.last_restart_at = time.time()
        history.down_since = None
        self._write()

    def _write(self) -> None:
        try:
            write_private(self._path, msgspec.json.encode(self._parts).decode())
        except OSError as error:
            LOG.warning("the record of restarts cannot be written: %s", error)


def read_parts(path: Path) -> dict[str, PartHistory]:
    """What a `PartRecord` wrote; nothing where no part has ended yet, or nobody keeps a record."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, PartHistory])
    except (OSError, msgspec.MsgspecError):
        return {}
