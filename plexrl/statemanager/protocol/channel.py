"""One end of a Unix socket connection: whole messages, with file descriptors.

    u32 body length | u16 descriptors | u8 kind | u8 zero | body (msgpack)

A message is one `sendmsg`; its descriptors are the ancillary data of its first byte. The kernel
passes at most 253 descriptors at once. Further ones follow the body, in batches that each come with
one extra byte. The ends alternate between request and answer, so bytes after a message's end are a
protocol error.

The channel does not decode a body. A peer whose frames are valid stays in sync, whatever the bodies
contain.
"""

import array
import os
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from plexrl.errors import ConnectionLostError, InvalidRequestError, PayloadTooLargeError
from plexrl.wire.framing import CLOSE_ON_EXEC, take_descriptors

BODY_BYTES_MAX = 64 << 20
DESCRIPTORS_MAX = 1024
"""Maximum descriptors in one message: far more than a node has ranks."""
DESCRIPTORS_AT_ONCE = 253
"""Linux's limit for one call."""
BUFFER_BYTES = 64 << 10
"""Size of the buffers that a connection keeps. A larger message gets a buffer of its own."""

_HEAD = struct.Struct("<IHBx")
_HEAD_BYTES = _HEAD.size
_pack_head, _unpack_head = _HEAD.pack_into, _HEAD.unpack_from
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_AT_ONCE * array.array("i").itemsize)
_TIMEVAL = struct.Struct("@ll")


class Kind(IntEnum):
    """Type of a message."""

    REQUEST = 0
    RESULT = 1
    ERROR = 2


Received = tuple[int, memoryview, list[int]]
"""A message's kind, body and descriptors. The body is a view of the channel's buffer, valid until
the next `receive`; the receiver closes the descriptors."""


class Channel:
    """Owns its socket. One thread at a time."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        send_timeout_s: float | None = None,
        receive_timeout_s: float | None = None,
    ) -> None:
        """The timeouts bound each wait; absent: none. The kernel applies them, because Python's own
        cost a system call each time."""
        connection.settimeout(None)
        for option, timeout_s in (
            (socket.SO_SNDTIMEO, send_timeout_s),
            (socket.SO_RCVTIMEO, receive_timeout_s),
        ):
            if timeout_s is not None:
                connection.setsockopt(socket.SOL_SOCKET, option, _timeval(timeout_s))
        self._socket = connection
        self._out = bytearray(BUFFER_BYTES)
        self._in = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._in)
        # Looked up once, because a round trip takes only microseconds.
        self._target = (self._view,)
        self._encode_into = msgspec.msgpack.Encoder().encode_into
        self._send = connection.send
        self._sendall = connection.sendall
        self._recv_into = connection.recv_into
        self._recvmsg_into = connection.recvmsg_into

    def __enter__(self) -> "Channel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def send(self, kind: Kind, body: Any, fds: Sequence[int] = ()) -> None:
        """Send one message; the caller keeps the descriptors.

        Raises:
            PayloadTooLargeError: it exceeds a limit; nothing was sent.
            InvalidRequestError: msgpack cannot encode it, for example an integer beyond 64 bits.
            OSError: the peer is gone or does not receive.
        """
        out = self._out
        try:
            self._encode_into(body, out, _HEAD_BYTES)
        except (TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"a message cannot be encoded: {error}") from error
        nbytes = len(out) - _HEAD_BYTES
        if nbytes > BODY_BYTES_MAX or len(fds) > DESCRIPTORS_MAX:
            self._out = bytearray(BUFFER_BYTES)
            raise PayloadTooLargeError(
                f"a message of {nbytes} bytes and {len(fds)} descriptors exceeds the limit of "
                f"{BODY_BYTES_MAX} and {DESCRIPTORS_MAX}: send less at once",
                nbytes=nbytes,
            )
        _pack_head(out, 0, nbytes, len(fds), kind)
        if not fds:
            sent = self._send(out)
            if sent < len(out):
                self._sendall(memoryview(out)[sent:])
        else:
            sent = socket.send_fds(self._socket, [out], list(fds[:DESCRIPTORS_AT_ONCE]))
            if sent < len(out):
                self._sendall(memoryview(out)[sent:])
            for first in range(DESCRIPTORS_AT_ONCE, len(fds), DESCRIPTORS_AT_ONCE):
                lot = list(fds[first : first + DESCRIPTORS_AT_ONCE])
                socket.send_fds(self._socket, [b"\0"], lot)
        if nbytes > BUFFER_BYTES:
            self._out = bytearray(BUFFER_BYTES)

    def receive_plain(self) -> Received:
        """The next message, which has no descriptors, in half the time. Raises as `receive`. The
        kernel closes descriptors that arrive nevertheless."""
        filled = self._recv_into(self._in)
        if filled > _HEAD_BYTES:
            nbytes, announced, kind = _unpack_head(self._in)
            if not announced and filled == _HEAD_BYTES + nbytes:
                return kind, self._view[_HEAD_BYTES:filled], []
        return self._receive(filled, [])

    def receive(self) -> Received:
        """The next message.

        Raises:
            ConnectionLostError: the peer closed, or broke the protocol.
            PayloadTooLargeError: it announced more than the limits allow.
            OSError: nothing arrived in time.
        """
        fds: list[int] = []
        try:
            filled, ancillary, flags, _ = self._recvmsg_into(
                self._target, _ANCILLARY_BYTES, CLOSE_ON_EXEC
            )
            if filled > _HEAD_BYTES and not ancillary and not flags:
                nbytes, announced, kind = _unpack_head(self._in)
                if not announced and filled == _HEAD_BYTES + nbytes:
                    # Nearly every message.
                    return kind, self._view[_HEAD_BYTES:filled], fds
            _take(filled, ancillary, flags, fds)
        except BaseException:
            close_all(fds)
            raise
        return self._receive(filled, fds)

    def _receive(self, filled: int, fds: list[int]) -> Received:
        """The message whose first `filled` bytes, and `fds`, have arrived."""
        try:
            if filled == 0:
                raise ConnectionLostError("the peer closed the connection")
            while filled < _HEAD_BYTES:
                filled += self._receive_into(self._view[filled:], fds)
            nbytes, announced, kind = _unpack_head(self._in)
            if nbytes > BODY_BYTES_MAX or announced > DESCRIPTORS_MAX:
                raise PayloadTooLargeError(
                    f"a message announced {nbytes} bytes and {announced} descriptors; the limit is "
                    f"{BODY_BYTES_MAX} and {DESCRIPTORS_MAX}",
                    nbytes=nbytes,
                )
            end = _HEAD_BYTES + nbytes
            if filled < end:
                body = self._receive_rest(filled, end, fds)[_HEAD_BYTES:]
            elif filled == end:
                body = self._view[_HEAD_BYTES:end]
            else:
                raise ConnectionLostError("the peer sent more than one message at once")
            while len(fds) < announced:
                before = len(fds)
                self._receive_into(bytearray(1), fds)
                if len(fds) == before:
                    raise ConnectionLostError(f"{before} of {announced} descriptors arrived")
            if len(fds) > announced:
                raise ConnectionLostError(f"{len(fds)} descriptors arrived, {announced} announced")
        except BaseException:
            close_all(fds)
            raise
        return kind, body, fds

    def _receive_rest(self, filled: int, end: int, fds: list[int]) -> memoryview:
        """The message of `end` bytes, whose first `filled` bytes are in the buffer."""
        whole = self._in
        view = self._view[:end]
        while filled < end:
            if filled == len(view):
                # It grows with what has arrived, so an announced length alone takes no memory.
                whole = bytearray(min(end, 4 * filled))
                whole[:filled] = view
                view = memoryview(whole)
            filled += self._receive_into(view[filled:], fds)
        return view

    def _receive_into(self, target: memoryview | bytearray, fds: list[int]) -> int:
        count, ancillary, flags, _ = self._recvmsg_into((target,), _ANCILLARY_BYTES, CLOSE_ON_EXEC)
        _take(count, ancillary, flags, fds)
        return count


def _take(
    count: int, ancillary: Sequence[tuple[int, int, bytes]], flags: int, fds: list[int]
) -> None:
    """Add the descriptors of one `recvmsg` to `fds`."""
    take_descriptors(ancillary, flags, fds)
    if len(fds) > DESCRIPTORS_MAX:
        raise ConnectionLostError(f"more than {DESCRIPTORS_MAX} descriptors arrived")
    if count == 0:
        raise ConnectionLostError("the peer closed the connection")


def _timeval(seconds: float) -> bytes:
    whole, part = divmod(max(seconds, 1e-3), 1.0)
    return _TIMEVAL.pack(int(whole), int(part * 1e6))


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        os.close(fd)
