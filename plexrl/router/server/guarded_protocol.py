"""uvicorn's HTTP/1.1 connection with further deadlines.

The head of a request must arrive within `header_timeout_s` of its first byte. The rest of a body
that the application did not read must arrive within the same time after the response. A connection
is anonymous until one of its requests has carried a valid key. An anonymous connection has no more
than this time between requests and to read a response; one with a key has `READ_FACTOR` times as
long before it reads on. A request that the application handles has
no deadline here: long polls take as long as they need, and `request_limits` limits the body.

Large parts of a body of declared length pass h11 by. That reads and updates h11's own count of the
bytes left, for which h11 has no public name. Nor has it one for its buffer of received bytes, which
is replaced by one that refuses ambiguous framing.
"""

import asyncio
from typing import TYPE_CHECKING, Any, cast

import h11
from h11._readers import ContentLengthReader
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from plexrl.router.server.connections import Connections
from plexrl.router.server.lingering_close import LingeringTransport
from plexrl.router.server.strict_framing import StrictBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE_PART_BYTES = 16 << 10
"""Smaller parts of a body pass through h11."""
READ_FACTOR = 12.0
"""By how much longer a client with a key may read nothing of a response: it may write what it reads
to a slow disk."""
STATE_KEY = "connection"
"""Key of a request's connection in `scope["state"]`."""


class GuardedProtocol(H11Protocol):
    """One connection with deadlines."""

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
        self.on_made: Callable[[], None] | None = None
        """Called when the connection is made, before it is registered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection; close it if it is over the limit."""
        self._lingering = LingeringTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self.conn._receive_buffer = StrictBuffer()
        if self.on_made is not None:
            self.on_made()
            # Break the cycle with the TLS layer.
            self.on_made = None
        if not self._connections.admit(self, self.client[0] if self.client else ""):
            self.drop()
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Unregister the connection."""
        self._cancel_deadline()
        self._connections.lost(self)
        # The state refers to this object; removing the entry breaks the cycle.
        self.app_state.pop(STATE_KEY, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        if self.transport.is_closing():
            return
        if self._lingering.is_lingering:
            self._lingering.discard(len(data))
            return
        was_busy = self._is_busy
        if not self._take_body(data):
            super().data_received(data)
        self._lingering.is_request_unread = self.conn.their_state is h11.SEND_BODY
        if self._is_busy and not was_busy:
            self._connections.became_busy(self)
        self._watch()

    def _take_body(self, data: bytes) -> bool:
        """Take a part of a body, but not its end, past h11, which copies large parts five times."""
        conn, cycle = self.conn, self.cycle
        reader = conn._reader
        if (
            len(data) < LARGE_PART_BYTES
            or conn.their_state is not h11.SEND_BODY
            or conn.our_state is not h11.SEND_RESPONSE
            or not isinstance(reader, ContentLengthReader)
            or conn.trailing_data[0]
            or len(data) >= reader._remaining
        ):
            return False
        reader._remaining -= len(data)
        cycle.body += data
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()
        return True

    def on_response_complete(self) -> None:
        """Handle the end of a response."""
        answered = self.cycle
        super().on_response_complete()
        # A pipelined request may have begun already.
        if self.cycle is answered and not self._is_anonymous:
            self._connections.became_idle(self)
        self._watch()

    def pause_writing(self) -> None:
        """Set a deadline for a client that does not read its response: it keeps a connection, and
        the slot of a stream, from others."""
        super().pause_writing()
        self._start_deadline(1.0 if self._is_anonymous else READ_FACTOR)

    def resume_writing(self) -> None:
        """Cancel that deadline once the client reads again."""
        super().resume_writing()
        if self._is_busy:
            self._cancel_deadline()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        self.drop()

    def authenticated(self) -> None:
        """Record that the request in progress carries a valid key."""
        if self._is_anonymous:
            self._is_anonymous = False
            self._connections.authenticated(self)
            self._cancel_deadline()

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Start or cancel the deadline; slowly arriving bytes do not extend a running one, nor do
        further requests of a client that reads no response."""
        if self._is_busy:
            if not self.flow.write_paused:
                self._cancel_deadline()
        elif self._is_anonymous or self._is_half_sent:
            self._start_deadline()
        else:
            self._cancel_deadline()

    @property
    def _is_half_sent(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])

    def _start_deadline(self, factor: float = 1.0) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(factor * self._header_timeout_s, self.drop)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def guarded(connections: Connections, header_timeout_s: float) -> type[GuardedProtocol]:
    """The protocol class with which uvicorn makes connections."""

    class Guarded(GuardedProtocol):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(connections, header_timeout_s, **arguments)

    return Guarded
