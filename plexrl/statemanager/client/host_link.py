"""Lender of a host arena: the rank's StateManager."""

from plexrl.statemanager.client.host_arena import Borrowed
from plexrl.statemanager.client.rank_link import RankLink
from plexrl.statemanager.protocol.host_requests import Returned, ReturnHost


class HostLink:
    """A `Lender` over a rank's connection."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def borrow(self) -> Borrowed:
        """As `RankLink.borrow_host`."""
        return self._link.borrow_host()

    def copied(self) -> None:
        """As `Lender.copied`: the StateManager may move the version."""
        self._link.call(ReturnHost(what=Returned.BASE))

    def abandoned(self) -> None:
        """As `Lender.abandoned`."""
        self._link.call(ReturnHost(what=Returned.LOAN))
