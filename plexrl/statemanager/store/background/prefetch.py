"""Prefetch: promotes versions to the host tier before their load, one at a time.

A request is only a hint. If a prefetch fails, the failure is logged, and the load reads the version
from its current tier.
"""

import logging
import queue
import threading

from plexrl.errors import PlexRLError
from plexrl.statemanager.layout.versions import VersionKind
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName

LOG = logging.getLogger(__name__)

HINTS_MAX = 256
"""Queued hints; further ones are discarded."""

_Hint = tuple[str, int]
"""Deployment and sequence number."""


class Prefetcher:
    """A thread that prefetches versions until `close`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._hints: queue.Queue[_Hint | None] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hint(self, deployment: str, seq: int) -> None:
        """Queue the prefetch of every rank's version `seq`."""
        if self._hints.qsize() >= HINTS_MAX:
            LOG.warning(
                "the prefetch queue is full; version %d of %s is not prefetched", seq, deployment
            )
            return
        self._hints.put((deployment, seq))

    def close(self) -> None:
        """Cancel the current prefetch and wait for the thread to end.

        A version that reached the host tier during the daemon's exit would be deleted with it.
        """
        self._closing.set()
        self._store.allocator.cancel_background()
        self._hints.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (hint := self._hints.get()) is not None:
            self._prefetch(*hint)

    def _prefetch(self, deployment: str, seq: int) -> None:
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
                    LOG.info("%s is not prefetched: the host tier is full", manifest.description)
            except PlexRLError as error:
                LOG.info("%s was not prefetched: %s", manifest.description, error)
