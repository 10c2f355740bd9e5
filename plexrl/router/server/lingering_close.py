"""Closes connections so that a client that is still sending can read its answer.

A socket that is closed while received bytes are unread resets the connection, and the client's
system then throws away the answer too. So the server first ends its own direction only, and
discards what still arrives, within a bound.
"""

import asyncio
from typing import Any

DISCARDED_BYTES_MAX = 64 << 20
"""Most bytes that a client may send after its answer, before the connection is reset."""


class LingeringTransport:
    """A transport whose first `close` only ends the server's direction if the request is unread."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_request_unread = False
        """Whether the client may still be sending the request that was answered."""
        self.is_lingering = False
        self._discarded_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Close the connection: at once, or once the client has had time to read."""
        if self.is_lingering or not self.is_request_unread or self._transport.is_closing():
            self._transport.close()
            return
        self.is_lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def discard(self, nbytes: int) -> None:
        """Count bytes that arrived after the answer; reset the connection beyond the bound."""
        self._discarded_bytes += nbytes
        if self._discarded_bytes > DISCARDED_BYTES_MAX:
            self._transport.abort()
