"""A blocking TLS socket that several threads may use at once.

OpenSSL works on memory here, under a lock; outside of it the socket moves up to `CHUNK_BYTES` at a
time. `ssl.SSLSocket` would need two system calls for each received record of 16 KiB, and is not
safe if one thread reads while another writes.
"""

import errno
import os
import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

CHUNK_BYTES = 256 << 10
"""Most bytes of one system call, and of each buffer of a connection: they stay in the CPU cache."""
FIRST_BYTES = 16 << 10
"""Size of the receive buffer of a connection that has had short messages only."""


def shut_down(connected: "socket.socket | TlsSocket") -> None:
    """End a connection for both sides; waiting threads and tasks see its end. No effect on one that
    has ended."""
    with suppress(OSError):
        if isinstance(connected, TlsSocket):
            connected.shutdown(socket.SHUT_RDWR)
        else:
            # Not `SSLSocket.shutdown`, which drops the TLS state that is still in use.
            socket.socket.shutdown(connected, socket.SHUT_RDWR)


class TlsSocket:
    """A connected socket after its TLS handshake, with the methods of `socket.socket` that frames
    need. A timeout raises `TimeoutError`, every other failure another `OSError`."""

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, *, server_side: bool = False
    ) -> None:
        """Shakes hands within the timeout of `connected`, which then belongs to this object.

        Raises:
            ssl.SSLError: one side does not accept the other; the caller closes `connected`.
            OSError: the other side has left, or is silent.
        """
        self._timeout_s = connected.gettimeout()
        connected.setblocking(False)
        self._socket = connected
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=server_side)
        self._lock = threading.Lock()
        """Guards OpenSSL's object and both of its memories."""
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._unsent = memoryview(b"")
        """Encrypted bytes, in the order of their records. Guarded by `_sending`."""
        self._buffer = memoryview(bytearray(FIRST_BYTES))
        self._shake_hands()

    def getpeercert(self) -> dict[str, Any] | None:
        """The verified certificate of the other side, as `ssl.SSLSocket.getpeercert`."""
        return self._tls.getpeercert()

    def fileno(self) -> int:
        """The descriptor; that it is readable does not say that data has arrived."""
        return self._socket.fileno()

    def settimeout(self, timeout_s: float | None) -> None:
        """Bound every later wait; None: no bound."""
        self._timeout_s = timeout_s

    def recv_into(self, buffer: memoryview | bytearray, /) -> int:
        """Receive at least one byte; 0: the other side has closed."""
        view = memoryview(buffer).cast("B")
        if not view.nbytes:
            return 0
        deadline = self._deadline()
        with self._receiving:
            while True:
                with self._lock:
                    count = self._decrypt(view)
                if count is not None:
                    return count
                self._fetch(deadline)

    def recv(self, size: int, /) -> bytes:
        """As `recv_into`, into new memory."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer)])

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None:
        """Send everything. Calls of several threads do not mix."""
        view = memoryview(data).cast("B")
        with self._sending:
            for start in range(0, view.nbytes, CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                with self._lock:
                    while piece.nbytes:
                        piece = piece[self._tls.write(piece) :]
                self._send_pending()

    def shutdown(self, how: int, /) -> None:
        """End the connection for both sides; waiting threads see its end."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Close the descriptor. Call `shutdown` before, if other threads use it."""
        self._socket.close()

    def _shake_hands(self) -> None:
        deadline = self._deadline()
        with self._receiving, self._sending:
            while True:
                try:
                    self._tls.do_handshake()
                except ssl.SSLWantReadError:
                    self._send_pending()
                    self._fetch(deadline)
                except ssl.SSLError:
                    # The alert says why, if the other side is there to read it.
                    with suppress(OSError):
                        self._send_pending()
                    raise
                else:
                    self._send_pending()
                    return

    def _decrypt(self, view: memoryview) -> int | None:
        """Fill `view` from the received records; 0: their end, None: there is no whole one."""
        done = 0
        try:
            while done < view.nbytes and (count := self._tls.read(view.nbytes - done, view[done:])):
                done += count  # type: ignore[operator]  # into a buffer it returns the count
        except ssl.SSLWantReadError:
            return done or None
        except ssl.SSLEOFError:
            return done
        except ssl.SSLError:
            if not done:
                raise
        return done

    def _fetch(self, deadline: float | None) -> None:
        """Receive some encrypted bytes. The caller holds `_receiving`."""
        count = self._when_possible(
            lambda: self._socket.recv_into(self._buffer), selectors.EVENT_READ, deadline
        )
        with self._lock:
            if count:
                self._received.write(self._buffer[:count])
            else:
                self._received.write_eof()
        if count == self._buffer.nbytes < CHUNK_BYTES:
            self._buffer = memoryview(bytearray(2 * count))

    def _send_pending(self) -> None:
        """Send what OpenSSL has written. The caller holds `_sending`. After a timeout the next call
        sends the rest first."""
        deadline = self._deadline()
        while True:
            if not self._unsent.nbytes:
                with self._lock:
                    self._unsent = memoryview(self._to_send.read())
            if not self._unsent.nbytes:
                return
            sent = self._when_possible(
                lambda: self._socket.send(self._unsent), selectors.EVENT_WRITE, deadline
            )
            self._unsent = self._unsent[sent:]

    def _deadline(self) -> float | None:
        return None if self._timeout_s is None else monotonic() + self._timeout_s

    def _when_possible(self, step: Callable[[], int], event: int, deadline: float | None) -> int:
        while True:
            try:
                return step()
            except BlockingIOError:
                descriptor = self._socket.fileno()
                if descriptor < 0:
                    # Another thread closed it since.
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None
                with selectors.PollSelector() as ready:
                    ready.register(descriptor, event)
                    left_s = None if deadline is None else max(0.0, deadline - monotonic())
                    if not ready.select(left_s):
                        raise TimeoutError("the other side is silent") from None
