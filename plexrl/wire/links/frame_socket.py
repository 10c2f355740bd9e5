"""Frames (`plexrl.wire.framing`) on an asyncio socket, without copies of large payloads.

asyncio's streams copy data to their own buffers and transfer 64 KiB at a time. This module sends a
payload from its own memory, part by part, and receives it into its final buffer. So it does over
TLS: OpenSSL reads and writes these buffers itself, and the loop only waits for the descriptor. A
payload that is a whole mapped file is not sent over a Unix socket at all, only its descriptor is.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from plexrl.errors import ConnectionLostError
from plexrl.wire.framing import (
    FILE_KEY,
    HEAD_BYTES,
    UNSEEN_BYTES_MAX,
    Buffer,
    Header,
    MappedFile,
    decode_header,
    decode_lengths,
    encode_head,
)
from plexrl.wire.links.address import Address, TlsAddress, UnixAddress
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import (
    CONNECT_TIMEOUT_S,
    check_accepted,
    check_server,
    client_context,
    detect_loss,
    needed,
    raise_refusal,
)
from plexrl.wire.links.tls_socket import shut_down

_Result = TypeVar("_Result")

SOCKET_BUFFER_BYTES = 4 << 20
"""Requested size of the kernel's buffers; the kernel may grant less. Larger buffers need fewer
wake-ups of the event loop."""

UNYIELDING_BYTES = 1 << 18
"""Less data than this is moved over TLS without letting other tasks run."""

SLICE_BYTES = 1 << 20
"""Most bytes moved per call, so that the event loop can run other tasks in between."""


class FrameSocket:
    """One connection. Callers serialise their sends; only one task receives."""

    def __init__(self, connected: socket.socket) -> None:
        """`connected`: a plain socket, or an `ssl.SSLSocket`."""
        connected.setblocking(False)
        self._is_closed = False
        self._stream: _PlainStream | _TlsStream
        if isinstance(connected, ssl.SSLSocket):
            self._stream = _TlsStream(connected)
            return
        self._stream = _PlainStream(connected)
        if connected.family == socket.AF_UNIX:
            # Buffers of TCP grow by themselves.
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                with contextlib.suppress(OSError):
                    connected.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    @classmethod
    async def connect(
        cls,
        address: Address,
        credentials: Credentials | None = None,
        *,
        role: Role = Role.NODE,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> "FrameSocket":
        """A connection to the process at `address`, which must have `role`. Raises as
        `plexrl.wire.links.dial.connect`."""
        async with asyncio.timeout(timeout_s):
            if isinstance(address, UnixAddress):
                return cls(await _connected(socket.AF_UNIX, address.path))
            return await cls._connect_tls(address, credentials, role)

    @classmethod
    async def _connect_tls(
        cls, address: TlsAddress, credentials: Credentials | None, role: Role
    ) -> "FrameSocket":
        context = client_context(credentials, address)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        raw = await _connected(found[0][0], found[0][4])
        try:
            detect_loss(raw)
            secure = context.wrap_socket(raw, do_handshake_on_connect=False)
        except BaseException:
            raw.close()
            raise
        link = cls(secure)
        try:
            assert isinstance(link._stream, _TlsStream)
            await link._stream.handshake()
            peer = needed(credentials, address).admit(secure.getpeercert(), secure)
            check_server(address, peer, role)
            answer, _ = await link.receive()
            check_accepted(address, answer)
        except BaseException as error:
            link.close()
            raise_refusal(address, error)
            raise
        return link

    async def send(self, header: Mapping[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Send one frame whose payload is the concatenation of these parts.

        After a cancelled send the stream is out of sync, and the caller must close it.

        Raises:
            ConnectionLostError: the peer is gone.
        """
        views = [memoryview(part).cast("B") for part in payload]
        file = self._passed_file(views)
        if file is not None:
            header, views = {**header, FILE_KEY: len(file)}, []
        head = encode_head(header, sum(view.nbytes for view in views))
        if self._is_closed:
            raise ConnectionLostError("the connection is closed")
        try:
            if file is None:
                await self._stream.send(memoryview(head))
            else:
                assert isinstance(self._stream, _PlainStream)
                await self._stream.send_with_file(memoryview(head), file.descriptor)
            for view in views:
                for start in range(0, view.nbytes, SLICE_BYTES):
                    await self._stream.send(view[start : start + SLICE_BYTES])
        except OSError as error:
            raise ConnectionLostError(f"the peer closed the connection: {error}") from error

    async def receive(self) -> tuple[Header, bytearray]:
        """The next frame. Raises as `framing.recv_frame`."""
        header_bytes, payload_bytes = decode_lengths(await self._exactly(HEAD_BYTES))
        body = await self._exactly(header_bytes)
        payload = await self._exactly(payload_bytes)
        return decode_header(body), payload

    def close(self) -> None:
        """Close the connection. The caller cancels its receiving task first. A running send raises
        `ConnectionLostError`."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.close()

    def _passed_file(self, views: Sequence[memoryview]) -> MappedFile | None:
        """The file that is the whole payload, if the peer can get its descriptor."""
        if len(views) != 1 or not isinstance(self._stream, _PlainStream):
            return None
        file = views[0].obj
        if not isinstance(file, MappedFile) or views[0].nbytes != len(file):
            return None
        return file if self._stream.passes_files else None

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
            count = await self._stream.receive(view)
        except OSError as error:
            raise ConnectionLostError("the peer closed the connection") from error
        if count == 0:
            raise ConnectionLostError("the peer closed the connection")
        return count


class _PlainStream:
    """A socket without TLS."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._is_sending = self._is_closed = False
        self.passes_files = connected.family == socket.AF_UNIX

    async def send(self, view: memoryview) -> None:
        """Send all bytes."""
        await self._send(self._loop.sock_sendall(self._socket, view))

    async def send_with_file(self, view: memoryview, descriptor: int) -> None:
        """Send all bytes, the first of them with a descriptor; only if `passes_files`."""
        await self._send(self._all_with_file(view, descriptor))

    async def _all_with_file(self, view: memoryview, descriptor: int) -> None:
        while True:
            try:
                sent = socket.send_fds(self._socket, [view], [descriptor])
                break
            except BlockingIOError:
                await self._writable()
        await self._loop.sock_sendall(self._socket, view[sent:])

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._socket)

    async def _send(self, sending: Coroutine[Any, Any, None]) -> None:
        self._is_sending = True
        try:
            await sending
        finally:
            self._is_sending = False
            if self._is_closed:
                self._socket.close()

    async def receive(self, view: memoryview) -> int:
        """Receive at least one byte; 0: the end of the stream."""
        return await self._loop.sock_recv_into(self._socket, view)

    def close(self) -> None:
        """Close the socket; a running send raises `OSError`."""
        self._is_closed = True
        shut_down(self._socket)
        if not self._is_sending:
            # The loop would wait forever on a closed descriptor, so a running send closes it.
            self._socket.close()


class _TlsStream:
    """A socket with TLS. OpenSSL is called until it needs the descriptor, which the loop watches
    then for all waiting tasks."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._readers: list[asyncio.Future[None]] = []
        self._writers: list[asyncio.Future[None]] = []
        self._is_closed = False

    async def handshake(self) -> None:
        """Agree with the other side. Raises `ssl.SSLError`."""
        await self._when_possible(self._socket.do_handshake)

    async def send(self, view: memoryview) -> None:
        """Send all bytes."""
        size = view.nbytes
        while view.nbytes:
            sent = await self._when_possible(partial(self._socket.send, view))
            view = view[sent:]
        await self._let_others_run(size)

    async def receive(self, view: memoryview) -> int:
        """Receive at least one byte; 0: the end of the stream."""
        try:
            count = await self._when_possible(partial(self._socket.recv_into, view))
            # A record is at most 16 KiB. What else has arrived is taken at once, without the loop.
            while count and count < view.nbytes:
                more = self._at_once(view[count:])
                if not more:
                    return count
                count += more
        except ssl.SSLEOFError:
            return 0
        await self._let_others_run(count)
        return count

    async def _let_others_run(self, moved_bytes: int) -> None:
        """Suspend this task after much data, for the descriptor may be ready at all times."""
        if moved_bytes >= UNYIELDING_BYTES:
            await asyncio.sleep(0)

    def _at_once(self, view: memoryview) -> int:
        try:
            return self._socket.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLEOFError):
            # The next call sees the end of the stream again.
            return 0

    def close(self) -> None:
        """Close the socket; waiting tasks raise `OSError`."""
        self._is_closed = True
        for waiting, unwatch in (
            (self._readers, self._loop.remove_reader),
            (self._writers, self._loop.remove_writer),
        ):
            if waiting:
                unwatch(self._socket.fileno())
            self._wake(waiting)
        shut_down(self._socket)
        self._socket.close()

    async def _when_possible(self, step: Callable[[], _Result]) -> _Result:
        while not self._is_closed:
            try:
                return step()
            except ssl.SSLWantReadError:
                await self._watch(self._readers, self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._watch(self._writers, self._loop.add_writer, self._loop.remove_writer)
        raise ConnectionAbortedError("this side closed the connection")

    async def _watch(
        self,
        waiting: "list[asyncio.Future[None]]",
        add: Callable[..., None],
        remove: Callable[[int], bool],
    ) -> None:
        descriptor = self._socket.fileno()
        future = self._loop.create_future()
        if not waiting:
            add(descriptor, self._wake, waiting, descriptor, remove)
        waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future in waiting:
                waiting.remove(future)
                if not waiting:
                    remove(descriptor)
            raise

    def _wake(
        self,
        waiting: "list[asyncio.Future[None]]",
        descriptor: int = -1,
        remove: Callable[[int], bool] | None = None,
    ) -> None:
        if remove is not None:
            remove(descriptor)
        for future in waiting:
            if not future.done():
                future.set_result(None)
        waiting.clear()


async def _connected(family: int, address: Any) -> socket.socket:
    connecting = socket.socket(family, socket.SOCK_STREAM)
    connecting.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connecting, address)
    except BaseException:
        connecting.close()
        raise
    return connecting
