"""Frames (`plexrl.wire.framing`) on an asyncio socket, without copies of large payloads.

asyncio's streams copy data to their own buffers and transfer 64 KiB at a time. This module sends a
payload from its own memory, part by part, and receives it into its final buffer.
"""

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from plexrl.errors import ConnectionLostError
from plexrl.wire.framing import (
    HEAD_BYTES,
    UNSEEN_BYTES_MAX,
    Buffer,
    Header,
    decode_header,
    decode_lengths,
    encode_head,
)

SOCKET_BUFFER_BYTES = 4 << 20
"""Requested size of the kernel's buffers; the kernel may grant less. Larger buffers need fewer
wake-ups of the event loop."""

SLICE_BYTES = 1 << 20
"""Most bytes moved per call, so that the event loop can run other tasks in between."""


class FrameSocket:
    """One connection. Callers serialise their sends; only one task receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._is_sending = self._is_closed = False
        connected.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    @classmethod
    async def connect(cls, address: str) -> "FrameSocket":
        """A connection to the Unix socket at `address`. Raises `OSError`."""
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connecting.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connecting, address)
        except BaseException:
            connecting.close()
            raise
        return cls(connecting)

    async def send(self, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Send one frame whose payload is the concatenation of these parts.

        After a cancelled send the stream is out of sync, and the caller must close it.

        Raises:
            ConnectionLostError: the peer is gone.
        """
        views = [memoryview(part).cast("B") for part in payload]
        head = encode_head(header, sum(view.nbytes for view in views))
        if self._is_closed:
            raise ConnectionLostError("the connection is closed")
        self._is_sending = True
        try:
            await self._loop.sock_sendall(self._socket, head)
            for view in views:
                for start in range(0, view.nbytes, SLICE_BYTES):
                    part = view[start : start + SLICE_BYTES]
                    await self._loop.sock_sendall(self._socket, part)
        except OSError as error:
            raise ConnectionLostError(f"the peer closed the connection: {error}") from error
        finally:
            self._is_sending = False
            if self._is_closed:
                self._socket.close()

    async def receive(self) -> tuple[Header, bytearray]:
        """The next frame. Raises as `framing.recv_frame`."""
        header_bytes, payload_bytes = decode_lengths(await self._exactly(HEAD_BYTES))
        body = await self._exactly(header_bytes)
        payload = await self._exactly(payload_bytes)
        return decode_header(body), payload

    def close(self) -> None:
        """Close the connection. The caller cancels its receiving task first. A running send raises
        `ConnectionLostError`."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_sending:
            # The loop would wait forever on a closed descriptor, so a running send closes it.
            self._socket.close()

    async def _exactly(self, size: int) -> bytearray:
        buffer = bytearray(min(size, UNSEEN_BYTES_MAX))
        filled = 0
        while True:
            with memoryview(buffer) as view:
                while filled < len(buffer):
                    filled += await self._some(view[filled : filled + SLICE_BYTES])
            if filled == size:
                return buffer
            # Above `UNSEEN_BYTES_MAX`, memory grows only with the received data.
            buffer += bytes(min(size - filled, filled))

    async def _some(self, view: memoryview) -> int:
        try:
            count = await self._loop.sock_recv_into(self._socket, view)
        except OSError as error:
            raise ConnectionLostError("the peer closed the connection") from error
        if count == 0:
            raise ConnectionLostError("the peer closed the connection")
        return count
