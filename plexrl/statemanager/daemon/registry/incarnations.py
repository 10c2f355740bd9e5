"""The newest launch of each rank: tickets of earlier launches are refused.

The incarnations are stored in the host tier's directory, next to the fencing tokens, and survive
the daemon.
"""

import logging
import threading
from pathlib import Path

import msgspec

from plexrl.errors import PermissionDeniedError, StorageError
from plexrl.statemanager.protocol.tickets import Claims
from plexrl.statemanager.store.disk_space import replace_file

LOG = logging.getLogger(__name__)


class Incarnations:
    """Highest incarnation of each rank. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._highest: dict[str, dict[int, int]] = {}
        if path.exists():
            self._highest = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[int, int]])

    def admit(self, claims: Claims) -> None:
        """Accept a worker's ticket and record its incarnation.

        Raises:
            PermissionDeniedError: a later incarnation was accepted before.
            StateTierFullError: the file system is full; nothing has changed.
        """
        with self._lock:
            ranks = self._highest.get(claims.deployment, {})
            highest = ranks.get(claims.rank, 0)
            if claims.incarnation < highest:
                raise PermissionDeniedError(
                    f"the ticket of {claims.holder} is for incarnation {claims.incarnation}, and "
                    f"{highest} is newer: this process has been replaced",
                    incarnation=claims.incarnation,
                )
            if claims.incarnation > highest:
                ranks = {**ranks, claims.rank: claims.incarnation}
                known = {**self._highest, claims.deployment: ranks}
                replace_file(self._path, msgspec.json.encode(known))
                self._highest = known

    def forget(self, deployment: str) -> None:
        """Remove the records of a deployment that has ended."""
        with self._lock:
            if self._highest.pop(deployment, None) is None:
                return
            try:
                replace_file(self._path, msgspec.json.encode(self._highest))
            except StorageError as error:
                # An old entry on disk does no harm, and the next write omits it.
                LOG.warning("the incarnations of an ended deployment remain recorded: %s", error)
