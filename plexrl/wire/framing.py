"""Frames: a small msgpack header and one binary payload, on any byte stream.

    u32 header length | u64 payload length | header (msgpack map) | payload

Both lengths are little-endian. The payload is opaque here; tensors are encoded as safetensors
(`plexrl.wire.tensors`). Workers and the StateManager use blocking sockets with one thread per
connection; router, scheduler and node agent use asyncio streams.

On a Unix socket a payload that is a whole file can be passed by its descriptor, which comes with
the frame's first byte. The frame has no payload bytes then, its header has the file's size under
`FILE_KEY`, and the receiver maps the file in place of a copy.
"""

import array
import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from plexrl.errors import ConnectionLostError, InvalidRequestError, PayloadTooLargeError

HEADER_BYTES_MAX = 64 << 20
PAYLOAD_BYTES_MAX = 16 << 30
UNSEEN_BYTES_MAX = 64 << 20
"""Most memory allocated for an announced length; above it, memory grows with the received data."""

FILE_KEY = "payload_file"
"""Header key of a payload that is passed as a file: its size in bytes."""

# Plain integers: an operation on the flags of `socket` costs more than the system call.
CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
"""Flag of `recvmsg`: processes that start later do not inherit the received descriptors."""

_TRUNCATED = int(socket.MSG_CTRUNC)
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * array.array("i").itemsize)
"""Room for four descriptors; a frame has one."""
_LENGTHS = struct.Struct("<IQ")
HEAD_BYTES = _LENGTHS.size
"""Size of the two lengths."""

Header = dict[str, Any]
Buffer = bytes | bytearray | memoryview


class MappedFile(mmap.mmap):
    """All bytes of a file that is not empty, to read; with a descriptor of the file."""

    descriptor = -1

    @classmethod
    def of(cls, descriptor: int) -> "MappedFile":
        """Map a file; the caller keeps its own `descriptor`. Raises `OSError`."""
        mapped = cls(descriptor, 0, prot=mmap.PROT_READ)
        mapped.descriptor = os.dup(descriptor)
        return mapped

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Stream(Protocol):
    """A blocking socket, plain or TLS (`plexrl.wire.links.tls_socket`)."""

    def recv_into(self, buffer: memoryview, /) -> int:
        """Receive at least one byte; 0: the other side has closed."""
        ...

    def sendall(self, data: Buffer, /) -> None:
        """Send everything."""
        ...


def encode_head(header: Mapping[str, Any], payload_bytes: int) -> bytes:
    """Lengths and header of a frame; the payload follows on the stream."""
    body = msgspec.msgpack.encode(header)
    _check_lengths(len(body), payload_bytes, PAYLOAD_BYTES_MAX)
    return _LENGTHS.pack(len(body), payload_bytes) + body


def send_frame(sock: Stream, header: Mapping[str, Any], payload: Buffer = b"") -> None:
    """Send one frame on a blocking socket. Callers serialise their sends."""
    view = memoryview(payload).cast("B")
    sock.sendall(encode_head(header, view.nbytes))
    if view.nbytes:
        sock.sendall(view)


def recv_frame(
    sock: Stream, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> tuple[Header, bytearray]:
    """The next frame of a blocking socket.

    Raises:
        ConnectionLostError: the peer closed the connection, possibly in the middle of a frame.
        PayloadTooLargeError: a length exceeds its bound; the stream is unusable then.
        InvalidRequestError: the header is not a msgpack map with text keys.
    """
    body, payload_bytes = _recv_head(sock, payload_bytes_max)
    # The payload is read even for a bad header, so that the stream stays in sync.
    payload = _recv_exactly(sock, payload_bytes)
    return decode_header(body), payload


def recv_head(sock: Stream, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> tuple[Header, int]:
    """The next frame's header, and the size of the payload, which the caller reads next.

    Raises as `recv_frame`; after a malformed header the stream is out of sync.
    """
    body, payload_bytes = _recv_head(sock, payload_bytes_max)
    return decode_header(body), payload_bytes


def recv_frame_or_file(sock: Stream) -> tuple[Header, bytearray | memoryview]:
    """As `recv_frame`, for a peer that may pass payloads as files on a Unix socket.

    Such a payload is a private mapping: it can be written, and the file does not change.
    """
    if not isinstance(sock, socket.socket) or sock.family != socket.AF_UNIX:
        return recv_frame(sock)
    lengths, files = _recv_with_files(sock)
    try:
        header_bytes, payload_bytes = decode_lengths(lengths)
        body = _recv_exactly(sock, header_bytes)
        payload = _recv_exactly(sock, payload_bytes)
        header = decode_header(body)
        size = header.get(FILE_KEY)
        if size is None:
            return header, payload
        if len(files) != 1 or os.fstat(files[0]).st_size != size:
            raise InvalidRequestError(
                f"a frame announces a file of {size} bytes, and {len(files)} files came with it: "
                "send one file of that size"
            )
        return header, memoryview(mmap.mmap(files[0], size, access=mmap.ACCESS_COPY))
    finally:
        for file in files:
            os.close(file)


def take_descriptors(
    ancillary: Sequence[tuple[int, int, bytes]], flags: int, files: list[int]
) -> None:
    """Add the descriptors that came with one `recvmsg` to `files`.

    Raises:
        ConnectionLostError: some were lost.
    """
    for level, kind, passed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(passed[: len(passed) - len(passed) % numbers.itemsize])
            files += numbers
    if flags & _TRUNCATED:
        raise ConnectionLostError("descriptors were lost: this process has too many files open")


async def write_frame(
    writer: asyncio.StreamWriter, header: Mapping[str, Any], payload: Buffer = b""
) -> None:
    """Write one frame, and wait until the transport's buffer has space again.

    Header and payload are queued without a suspension point between them, so frames of concurrent
    callers never interleave.
    """
    view = memoryview(payload).cast("B")
    if writer.is_closing():
        # A closed TLS transport would fail with an error of its own.
        raise ConnectionLostError("the connection is closed")
    writer.write(encode_head(header, view.nbytes))
    if view.nbytes:
        writer.write(view)
    try:
        await writer.drain()
    except OSError as error:
        raise ConnectionLostError(f"the peer closed the connection: {error}") from error


async def read_frame(
    reader: asyncio.StreamReader, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX
) -> tuple[Header, bytes]:
    """The next frame of an asyncio stream. Raises as `recv_frame`."""
    try:
        lengths = await reader.readexactly(HEAD_BYTES)
        header_bytes, payload_bytes = decode_lengths(lengths, payload_bytes_max)
        body = await reader.readexactly(header_bytes)
        payload = await reader.readexactly(payload_bytes) if payload_bytes else b""
    except (asyncio.IncompleteReadError, OSError) as error:
        raise ConnectionLostError("the peer closed the connection") from error
    return decode_header(body), payload


def _recv_head(sock: Stream, payload_bytes_max: int) -> tuple[bytearray, int]:
    lengths = _recv_exactly(sock, HEAD_BYTES)
    header_bytes, payload_bytes = decode_lengths(lengths, payload_bytes_max)
    return _recv_exactly(sock, header_bytes), payload_bytes


def decode_lengths(lengths: Buffer, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> tuple[int, int]:
    """Bytes of header and payload, from a frame's first `HEAD_BYTES`. Raises as `recv_frame`."""
    header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    _check_lengths(header_bytes, payload_bytes, payload_bytes_max)
    return header_bytes, payload_bytes


def decode_header(body: bytes | bytearray) -> Header:
    """A frame's header. Raises `InvalidRequestError`."""
    try:
        header: Header = msgspec.msgpack.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        # For bad UTF-8 and deep nesting msgspec raises Python's own errors.
        raise InvalidRequestError(f"a frame's header is malformed: {error}") from error
    return header


def _check_lengths(header_bytes: int, payload_bytes: int, payload_bytes_max: int) -> None:
    if header_bytes > HEADER_BYTES_MAX or payload_bytes > payload_bytes_max:
        raise PayloadTooLargeError(
            f"a frame of {header_bytes} + {payload_bytes} bytes is over the bound of "
            f"{HEADER_BYTES_MAX} + {payload_bytes_max}: split the batch",
            header_bytes=header_bytes,
            payload_bytes=payload_bytes,
        )


def _recv_with_files(sock: socket.socket) -> tuple[bytes, list[int]]:
    """A frame's lengths, and the descriptors that came with them, which the caller closes."""
    lengths, files = b"", list[int]()
    try:
        while len(lengths) < HEAD_BYTES:
            # Not `socket.recv_fds`, which ignores flags.
            part, ancillary, flags, _ = sock.recvmsg(
                HEAD_BYTES - len(lengths), _ANCILLARY_BYTES, CLOSE_ON_EXEC
            )
            take_descriptors(ancillary, flags, files)
            if not part:
                raise ConnectionLostError("the peer closed the connection")
            lengths += part
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return lengths, files


def _recv_exactly(sock: Stream, size: int) -> bytearray:
    buffer = bytearray(min(size, UNSEEN_BYTES_MAX))
    filled = 0
    while True:
        with memoryview(buffer) as view:
            while filled < len(buffer):
                count = sock.recv_into(view[filled:])
                if count == 0:
                    raise ConnectionLostError("the peer closed the connection")
                filled += count
        if filled == size:
            return buffer
        buffer += bytes(min(size - filled, filled))
