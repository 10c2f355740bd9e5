"""Which launch of a deployment a connection belongs to: a later one ends earlier ones' tickets.

They are kept in the host tier's directory, beside the fencing tokens, so they outlive the daemon.
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
    """Highest incarnation seen of each rank. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._highest: dict[str, dict[int, int]] = {}
        if path.exists():
            self._highest = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[int, int]])

    def admit(self, claims: Claims) -> None:
        """Note the incarnation of a worker's ticket.

        Raises:
            PermissionDeniedError: a later one came before.
            StateTierFullError: the file system has no room to note it; nothing has changed.
        """
        with self._lock:
            ranks = self._highest.get(claims.deployment, {})
            highest = ranks.get(claims.rank, 0)
            if claims.incarnation < highest:
                raise PermissionDeniedError(
                    f"the ticket of {claims.holder} is of incarnation {claims.incarnation}, and "
                    f"{highest} has come since: this process has been replaced",
                    incarnation=claims.incarnation,
                )
            if claims.incarnation > highest:
                ranks = {**ranks, claims.rank: claims.incarnation}
                known = {**self._highest, claims.deployment: ranks}
                replace_file(self._path, msgspec.json.encode(known))
                self._highest = known

    def forget(self, deployment: str) -> None:
        """The deployment is gone."""
        with self._lock:
            if self._highest.pop(deployment, None) is None:
                return
            try:
                replace_file(self._path, msgspec.json.encode(self._highest))
            except StorageError as error:
                # An entry too many does no harm. The next write leaves it out.
                LOG.warning("an ended deployment is still noted: %s", error)
