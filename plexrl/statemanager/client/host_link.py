"""A host arena's lender: the rank's own StateManager."""

from plexrl.statemanager.client.host_arena import Borrowed
from plexrl.statemanager.client.rank_link import RankLink
from plexrl.statemanager.protocol.host_requests import Returned, ReturnHost


class HostLink:
    """As `Lender`, over a rank's connection."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def borrow(self) -> Borrowed:
        """As `RankLink.borrow_host`."""
        return self._link.borrow_host()

    def copied(self) -> None:
        """Let the StateManager do with the version as it likes."""
        self._link.call(ReturnHost(what=Returned.BASE))

    def abandoned(self) -> None:
        """Let others have the memory."""
        self._link.call(ReturnHost(what=Returned.LOAN))
