"""Health of the daemon: writable tiers, free capacity, no stuck move."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from plexrl.statemanager.bytes.fair_queue import FairQueue
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName

FULL = 0.99
"""Share of a tier's capacity from which it counts as full."""


class Health:
    """Checks on every call; takes no lock that a move holds for long."""

    def __init__(
        self,
        config: StateManagerConfig,
        store: Store,
        move_queue: FairQueue,
        accepting: Callable[[], bool],
    ) -> None:
        """`accepting()` returns whether the socket still accepts connections."""
        self._config = config
        self._store = store
        self._move_queue = move_queue
        self._accepting = accepting

    def reasons(self) -> list[str]:
        """One sentence per problem, the same while it lasts; empty if the daemon is healthy."""
        config = self._config
        found = [
            *_writable("host tier", Path(config.host_dir)),
            *_writable("NVMe tier", Path(config.nvme_dir)),
        ]
        if not self._accepting():
            found.append(f"no connections are accepted on {config.listen}: restart the daemon")
        now = time.monotonic()
        found += [
            f"{move.kind} of {move.who} has been running for more than {config.stuck_move_s:g} s"
            for move in self._move_queue.running()
            if now - move.began > config.stuck_move_s
        ]
        if (
            # Allocations fail when the pool is full, which the catalog's count may not show.
            self._store.pool_bytes()[0] >= FULL * config.host_bytes
            and self._store.used_bytes(TierName.NVME) >= FULL * config.nvme_bytes
        ):
            found.append(
                "both tiers are full and further offloads are refused: release a job, or raise "
                "nvme_bytes"
            )
        return found


def _writable(what: str, directory: Path) -> list[str]:
    if not directory.is_dir():
        return [f"the {what}'s directory {directory} does not exist"]
    read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
    if read_only or not os.access(directory, os.W_OK | os.X_OK):
        return [f"the {what}'s directory {directory} is not writable"]
    return []
