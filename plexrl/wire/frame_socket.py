"""Frames (`plexrl.wire.framing`) on a socket of an event loop, for large payloads.

asyncio's streams copy what they carry into buffers of their own and carry it 64 KiB at a time. Here
a payload is sent from where it lies, part by part, and read into the memory that is then its own.
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
"""Asked of the kernel, which may give less: fewer turns of the loop for a large payload."""

SLICE_BYTES = 1 << 20
"""Moved by one call, so that the loop has others' turns in between."""


class FrameSocket:
    """One connection. Callers serialise their sends; one of them receives."""

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
        """Send one frame whose payload is these parts, end to end.

        A send that is cancelled half-way leaves the stream out of step: close it then.

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
        """End the connection; whoever receives on it must have been cancelled. A send that is under
        way is woken, and raises."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_sending:
            # The loop would wait for ever on a closed descriptor, so a sender closes it itself.
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
            # Beyond what is taken on trust, memory grows with what has come.
            buffer += bytes(min(size - filled, filled))

    async def _some(self, view: memoryview) -> int:
        try:
            count = await self._loop.sock_recv_into(self._socket, view)
        except OSError as error:
            raise ConnectionLostError("the peer closed the connection") from error
        if count == 0:
            raise ConnectionLostError("the peer closed the connection")
        return count
