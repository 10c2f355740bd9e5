"""A TCP link to a server on this machine, of limited bandwidth, that counts what it carries."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 256 << 10


class SlowLink:
    """Forwards connections to `port`; the limit is for each direction of each connection."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._target = port
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self.sent_bytes = 0
        """Carried from clients to the server."""
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_sent(self, nbytes: int, timeout_s: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.sent_bytes >= nbytes, timeout_s)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._carry, args=(client, server), daemon=True).start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            back = threading.Thread(target=self._forward, args=(server, client, False), daemon=True)
            back.start()
            self._forward(client, server, True)
            back.join()

    def _forward(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                target.sendall(data)
                if counted:
                    with self._changed:
                        self.sent_bytes += len(data)
                        self._changed.notify_all()
                time.sleep(len(data) / self._bytes_per_s)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_link(port: int, bytes_per_s: float) -> Iterator[SlowLink]:
    link = SlowLink(port, bytes_per_s)
    try:
        yield link
    finally:
        link.close()
