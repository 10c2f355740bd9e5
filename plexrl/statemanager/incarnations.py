"""Which launch of a deployment a connection belongs to: a later one ends earlier ones' tickets."""

import threading

from plexrl.errors import PermissionDeniedError
from plexrl.statemanager.tickets import Claims


class Incarnations:
    """Highest incarnation seen of each rank, since the daemon's start. Thread-safe.

    A daemon that was restarted knows of none; moves are then still fenced by their tokens.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._highest: dict[str, dict[int, int]] = {}

    def admit(self, claims: Claims) -> None:
        """Note the incarnation of a worker's ticket.

        Raises:
            PermissionDeniedError: a later one came before.
        """
        with self._lock:
            ranks = self._highest.setdefault(claims.deployment, {})
            highest = ranks.get(claims.rank, 0)
            if claims.incarnation < highest:
                raise PermissionDeniedError(
                    f"the ticket of {claims.holder} is of incarnation {claims.incarnation}, and "
                    f"{highest} has come since: this process has been replaced",
                    incarnation=claims.incarnation,
                )
            ranks[claims.rank] = claims.incarnation

    def forget(self, deployment: str) -> None:
        """The deployment is gone."""
        with self._lock:
            self._highest.pop(deployment, None)
