"""Draining: copies versions to NVMe before the host tier is full, so that eviction is immediate.

Versions are copied one at a time, in eviction order. A more urgent move cancels the copy, which is
retried later.
"""

import logging
import threading

from plexrl.errors import PlexRLError
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName

LOG = logging.getLogger(__name__)

DRAIN_FROM = 0.5
"""Usage of the host tier from which versions are copied. Most versions are superseded before they
have to be spilled."""
POLL_INTERVAL_S = 1.0


class Drainer:
    """A thread that copies versions until `close`."""

    def __init__(self, store: Store, host_bytes: int) -> None:
        self._store = store
        self._threshold_bytes = host_bytes * DRAIN_FROM
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel the current copy and end the thread."""
        self._closing.set()
        self._store.allocator.cancel_background()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(POLL_INTERVAL_S):
            if self._store.used_bytes(TierName.HOST) < self._threshold_bytes:
                continue
            for name in self._store.without_nvme_copy():
                if self._closing.is_set():
                    return
                try:
                    self._store.allocator.copy_to_nvme(name, in_background=True)
                except PlexRLError as error:
                    LOG.info("%s was not copied to NVMe: %s", name, error)
                    break
