"""Versions brought to the host tier ahead of their load or pull, one after the other.

Hints only: whatever stands in the way of one is logged, and the load reads from where the version
lies.
"""

import logging
import queue
import threading

from plexrl.errors import PlexRLError
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.versions import VersionKind

LOG = logging.getLogger(__name__)

HINTS_MAX = 256
"""Hints that wait; later ones are passed over."""

_Hint = tuple[str, int]
"""Deployment and sequence number."""


class Prefetcher:
    """A thread that follows hints until `close`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hints: queue.Queue[_Hint | None] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hint(self, deployment: str, seq: int) -> None:
        """Bring every rank's version `seq` to the host tier as soon as may be."""
        if self._hints.qsize() >= HINTS_MAX:
            LOG.warning("too many hints wait; version %d of %s is not prefetched", seq, deployment)
            return
        self._hints.put((deployment, seq))

    def close(self) -> None:
        """Have the version under way given up; nothing is moved to the host tier afterwards.

        Waits as long as that takes: what was brought there behind the back of the daemon's exit
        would be deleted with the host tier.
        """
        self._closing.set()
        self._store.cancel()
        self._hints.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (hint := self._hints.get()) is not None:
            self._follow(*hint)

    def _follow(self, deployment: str, seq: int) -> None:
        found = self._store.find(
            lambda m: (m.deployment, m.seq, m.kind) == (deployment, seq, VersionKind.STATE)
        )
        for version in found:
            if version.tier == TierName.HOST:
                continue
            if self._closing.is_set():
                return
            manifest = version.manifest
            try:
                if not self._store.prefetch(manifest.name, manifest.description):
                    LOG.info("no room to prefetch %s", manifest.description)
            except PlexRLError as error:
                LOG.info("%s was not prefetched: %s", manifest.description, error)
