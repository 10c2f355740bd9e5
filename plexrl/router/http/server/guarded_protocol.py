"""uvicorn's HTTP/1.1 connection with the deadlines that uvicorn has not.

A request's head must be there `header_timeout_s` after its first byte, and what is left of a body
that the application did not read as long after the answer. An anonymous connection, of which no
request has carried a valid key, has no more time than that between requests either, nor for reading
an answer. A request that the application works on has no deadline here: a long poll may take as
long as it likes, and its body has one in `plexrl.router.http.admission`.
"""

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from plexrl.router.http.server.connections import Connections

STATE_KEY = "connection"
"""Of a request's connection in its `scope["state"]`."""


class GuardedProtocol(H11Protocol):
    """One connection."""

    def __init__(
        self,
        connections: Connections,
        header_timeout_s: float,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, STATE_KEY: self}, _loop)
        self._connections = connections
        self._header_timeout_s = header_timeout_s
        self._is_anonymous = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, if there is a place for it."""
        super().connection_made(transport)
        if not self._connections.admit(self, self.client[0] if self.client else ""):
            self.drop()
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give its place up."""
        self._cancel_deadline()
        self._connections.lost(self)
        # It refers to itself by it.
        self.app_state.pop(STATE_KEY, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self.transport.is_closing():
            return
        was_busy = self._is_busy
        super().data_received(data)
        if self._is_busy and not was_busy:
            self._connections.became_busy(self)
        self._watch()

    def on_response_complete(self) -> None:
        """The application has answered."""
        answered = self.cycle
        super().on_response_complete()
        # A request that was sent ahead may have begun already.
        if self.cycle is answered and not self._is_anonymous:
            self._connections.became_idle(self)
        self._watch()

    def pause_writing(self) -> None:
        """The client does not read: a stranger's connection is not kept for that."""
        super().pause_writing()
        if self._is_anonymous:
            self._start_deadline()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._is_busy:
            self._cancel_deadline()

    def timeout_keep_alive_handler(self) -> None:
        """It was idle for too long; what the client did not read till now it will not."""
        self.drop()

    def authenticated(self) -> None:
        """The request under way carries a valid key."""
        if self._is_anonymous:
            self._is_anonymous = False
            self._connections.authenticated(self)
            self._cancel_deadline()

    def drop(self) -> None:
        """End the connection at once."""
        self.transport.abort()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Start or end the deadline; one that runs is not put off by what drips in."""
        if self._is_busy:
            self._cancel_deadline()
        elif self._is_anonymous or self._is_half_sent:
            self._start_deadline()
        else:
            self._cancel_deadline()

    @property
    def _is_half_sent(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._header_timeout_s, self.drop)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def guarded(connections: Connections, header_timeout_s: float) -> type[GuardedProtocol]:
    """What uvicorn makes a connection with."""

    class Guarded(GuardedProtocol):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(connections, header_timeout_s, **arguments)

    return Guarded
