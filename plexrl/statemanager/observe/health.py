"""Whether the daemon can do its work, and if not, why."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.transfer.copy.fair_queue import MoveLine

FULL = 0.99
"""Of both tiers' bounds: what comes next is refused, or very soon."""


class Health:
    """Looks anew each time it is asked; takes no lock that a move holds for long."""

    def __init__(
        self,
        config: StateManagerConfig,
        store: Store,
        line: MoveLine,
        accepting: Callable[[], bool],
    ) -> None:
        """`accepting` says whether the socket still takes connections."""
        self._config = config
        self._store = store
        self._line = line
        self._accepting = accepting

    def reasons(self) -> list[str]:
        """What is wrong, in sentences; empty: nothing."""
        config = self._config
        found = [
            *_writable("host tier", Path(config.host_dir)),
            *_writable("NVMe tier", Path(config.nvme_dir)),
        ]
        if not self._accepting():
            found.append(f"nobody accepts connections on {config.listen}")
        now = time.monotonic()
        found += [
            f"{move.kind} of {move.who} has been under way for {now - move.began:.0f} s"
            for move in self._line.running()
            if now - move.began > config.stuck_move_s
        ]
        if (
            # What the pool has left is what can be had, whatever the catalog counts.
            self._store.pool_taken_bytes() >= FULL * config.host_bytes
            and self._store.used_bytes(TierName.NVME) >= FULL * config.nvme_bytes
        ):
            found.append(
                "both tiers are full: what is offloaded next is refused; release a job, or raise "
                "nvme_bytes"
            )
        return found


def _writable(what: str, directory: Path) -> list[str]:
    if not directory.is_dir():
        return [f"the {what}'s directory {directory} is gone"]
    read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
    if read_only or not os.access(directory, os.W_OK | os.X_OK):
        return [f"the {what}'s directory {directory} cannot be written to"]
    return []
