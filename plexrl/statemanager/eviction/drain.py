"""Copies of versions on NVMe ahead of pressure, so that room in the host tier is made at once.

One at a time, in the order in which they would spill, and given up for whatever is more urgent: the
copy is made again later.
"""

import logging
import threading

from plexrl.errors import PlexRLError
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.store.store import Store

LOG = logging.getLogger(__name__)

DRAIN_FROM = 0.5
"""Share of the host tier that is in use before anything is copied: most versions are superseded
before they would ever have to spill."""
LOOK_AGAIN_S = 1.0


class Drainer:
    """A thread that copies until `close`."""

    def __init__(self, store: Store, host_bytes: int) -> None:
        self._store = store
        self._threshold_bytes = host_bytes * DRAIN_FROM
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Have the copy under way given up."""
        self._closing.set()
        self._store.cancel()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_AGAIN_S):
            if self._store.used_bytes(TierName.HOST) < self._threshold_bytes:
                continue
            for name in self._store.undrained():
                if self._closing.is_set():
                    return
                try:
                    self._store.keep_copy(name)
                except PlexRLError as error:
                    LOG.info("%s was not copied to NVMe: %s", name, error)
                    break
