"""Earlier versions, kept as a fallback if a newer version is damaged or lost.

A thread moves them to NVMe one at a time, while NVMe has space, so that they survive the host tier.
More urgent moves cancel such a move. Earlier versions are dropped first when space is short
(`TierAllocator.expendable_names`).
"""

import logging
import threading
from collections import OrderedDict

from plexrl.errors import OperationCancelledError, PlexRLError
from plexrl.statemanager.store.store import Store

LOG = logging.getLogger(__name__)

RETRY_S = 1.0
"""Delay before a cancelled move is retried."""
WAITING_MAX = 1024
"""Queued versions; beyond this the oldest stays in the host tier."""


class EarlierVersions:
    """A thread that moves earlier versions to NVMe until `close`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="earlier versions", daemon=True)
        self._thread.start()

    def keep(self, names: list[str]) -> None:
        """Mark versions as expendable and queue their move to NVMe."""
        self._store.mark_expendable(names)
        with self._changed:
            self._waiting.update(dict.fromkeys(names))
            while len(self._waiting) > WAITING_MAX:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel the current move and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._store.allocator.cancel_background()
        self._thread.join()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._store.allocator.copy_to_nvme(name, in_background=True, keep=False)
            except OperationCancelledError:
                with self._changed:
                    self._waiting[name] = None
                    self._changed.wait_for(lambda: self._is_closing, RETRY_S)
            except PlexRLError as error:
                LOG.info("%s stays in the host tier: %s", name, error)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or bool(self._waiting))
            return None if self._is_closing else self._waiting.popitem(last=False)[0]
