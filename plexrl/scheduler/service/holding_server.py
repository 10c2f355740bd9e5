"""Serves the scheduler's addresses before the scheduler can: answers every call with an outage.

While the journal cannot be opened, routers and agents connect and receive the reason, so clients
wait and retry instead of failing. The server never listens where another scheduler does.
"""

import logging
from collections.abc import Callable, Iterator, Mapping

from plexrl.errors import StorageError
from plexrl.process.conditions import Conditions
from plexrl.scheduler.service.listeners import Listeners
from plexrl.scheduler.state.messages.calls import Answer, Parameters
from plexrl.wire.links.dial import Link
from plexrl.wire.messages.cluster_views import ConditionsView
from plexrl.wire.messages.reports import Heartbeat
from plexrl.wire.rpc import Handler, Peer

LOG = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


class HoldingServer:
    """Listens from the first `hold` to `close`; calls `opened` when it starts."""

    def __init__(self, listeners: Listeners, opened: Callable[[], None]) -> None:
        self._listeners = listeners
        self._opened = opened
        self._is_holding = False
        self._peers: set[Peer] = set()
        self._conditions = Conditions()
        self._reason: StorageError | None = None

    async def hold(self, error: StorageError) -> None:
        """Answer every call with `error` until `close`."""
        if self._reason is None or self._reason.code != error.code:
            LOG.error("holding: %s", error)
        error.details.setdefault("retry_after_s", RETRY_AFTER_S)
        self._reason = error
        self._conditions.clear()
        self._conditions.hold(error)
        if self._is_holding or await self._listeners.is_served_by_another():
            return
        await self._listeners.open(self._connected)
        self._is_holding = True
        self._opened()

    async def close(self) -> None:
        """Stop listening and close all connections; peers connect again."""
        if not self._is_holding:
            return
        self._is_holding = False
        LOG.warning("the journal can be used: continuing")
        self._listeners.close()
        for peer in list(self._peers):
            peer.close()

    async def _connected(self, link: Link) -> None:
        peer = Peer(link.reader, link.writer, _Answers(self._hello, self._view, self._refuse))
        self._peers.add(peer)
        try:
            await peer.run()
        finally:
            self._peers.discard(peer)

    async def _hello(self, peer: Peer, params: Parameters) -> Heartbeat:
        del peer, params
        return {"is_holding": True}

    async def _view(self, peer: Peer, params: Parameters) -> ConditionsView:
        del peer, params
        return {"conditions": self._conditions.view()}

    async def _refuse(self, peer: Peer, params: Parameters) -> Answer:
        del peer, params
        assert self._reason is not None, "it listens without a reason"
        raise self._reason


class _Answers(Mapping[str, Handler]):
    """Handlers for every method name."""

    def __init__(self, hello: Handler, conditions: Handler, other: Handler) -> None:
        self._known = {"hello": hello, "conditions": conditions}
        self._other = other

    def __getitem__(self, method: str) -> Handler:
        return self._known.get(method, self._other)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)
