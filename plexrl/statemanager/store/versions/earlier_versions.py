"""Earlier versions, kept in case a newer one turns out to be damaged or lost.

They are moved to NVMe, so that they outlive the host tier, one after the other and only where NVMe
has room. Whatever is more urgent goes first. Any of them is dropped before anything else is when
room is short (`room`).
"""

import logging
import threading
from collections import OrderedDict

from plexrl.errors import OperationCancelledError, PlexRLError
from plexrl.statemanager.store.store import Store

LOG = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""After a move that gave way to another."""
WAITING_MAX = 1024
"""Versions that wait to be moved; beyond it the oldest stays in the host tier."""


class EarlierVersions:
    """A thread that moves them until `close`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="earlier versions", daemon=True)
        self._thread.start()

    def keep(self, names: list[str]) -> None:
        """Keep versions only while there is room, and soon on NVMe only."""
        self._store.keep_while_room(names)
        with self._changed:
            self._waiting.update(dict.fromkeys(names))
            while len(self._waiting) > WAITING_MAX:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    def close(self) -> None:
        """Have the move under way given up."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._store.cancel()
        self._thread.join()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._store.move_out(name)
            except OperationCancelledError:
                with self._changed:
                    self._waiting[name] = None
                    self._changed.wait_for(lambda: self._is_closing, LOOK_AGAIN_S)
            except PlexRLError as error:
                LOG.info("%s stays in the host tier: %s", name, error)

    def _next(self) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or bool(self._waiting))
            return None if self._is_closing else self._waiting.popitem(last=False)[0]
