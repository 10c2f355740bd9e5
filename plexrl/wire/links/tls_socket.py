"""A blocking TLS socket that several threads may use at once.

`ssl.SSLSocket` is not safe if one thread reads while another writes. Here every call of OpenSSL is
non-blocking and under one lock, and threads wait for the descriptor outside of it.
"""

import selectors
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

SEND_BYTES = 1 << 20
"""Most bytes that one thread moves while it holds the lock."""


class TlsSocket:
    """A connected socket after its handshake, with the methods of `socket.socket` that frames
    need. A timeout raises `TimeoutError`, every other failure another `OSError`."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._timeout_s = connected.gettimeout()
        connected.setblocking(False)
        self._socket = connected
        self._lock = threading.Lock()
        self._sending = threading.Lock()

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
        step = partial(_repeat, self._socket.recv_into, view[:SEND_BYTES])
        try:
            return self._when_possible(step)
        except ssl.SSLEOFError:
            return 0

    def recv(self, size: int, /) -> bytes:
        """As `recv_into`, into new memory."""
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(buffer)])

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None:
        """Send everything. Calls of several threads do not mix."""
        view = memoryview(data).cast("B")
        with self._sending:
            while view.nbytes:
                step = partial(_repeat, self._socket.send, view[:SEND_BYTES])
                view = view[self._when_possible(step) :]

    def shutdown(self, how: int, /) -> None:
        """End the connection for both sides; waiting threads see its end."""
        # Not `SSLSocket.shutdown`, which drops the TLS state that other threads still use.
        socket.socket.shutdown(self._socket, how)

    def close(self) -> None:
        """Close the descriptor. Call `shutdown` before, if other threads use it."""
        self._socket.close()

    def _when_possible(self, step: Callable[[], int]) -> int:
        deadline = None if self._timeout_s is None else monotonic() + self._timeout_s
        while True:
            with self._lock:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    event = selectors.EVENT_READ
                except ssl.SSLWantWriteError:
                    event = selectors.EVENT_WRITE
            with selectors.PollSelector() as ready:
                ready.register(self._socket.fileno(), event)
                left_s = None if deadline is None else max(0.0, deadline - monotonic())
                if not ready.select(left_s):
                    raise TimeoutError("the other side is silent")


def _repeat(step: Callable[[memoryview], int], view: memoryview) -> int:
    """Call `step` on the rest of `view` while it moves bytes at once; returns their number. OpenSSL
    moves one record of 16 KiB a call."""
    done = 0
    try:
        while done < view.nbytes and (count := step(view[done:])):
            done += count
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError):
        if not done:
            raise
    return done
