"""A worker's socket: one thread per connection reads frames into a queue for the main thread."""

import logging
import queue
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl.errors import PlexRLError
from plexrl.wire.framing import Buffer, recv_frame, send_frame

LOG = logging.getLogger(__name__)

REQUESTS_MAX = 1024


class Connection:
    """The connection of one router. A router that is gone is no error: another one retries."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, header: dict[str, Any], payload: Buffer = b"") -> None:
        """Send one frame."""
        with self._lock:
            try:
                send_frame(self._socket, header, payload)
            except OSError as error:
                LOG.info("could not send a reply, the router is gone: %s", error)

    def answer(self, ask: str, answer: dict[str, Any]) -> None:
        """Answer a request that is not an operation; `ask` is its id."""
        self.send({"reply": "answer", "operation": ask, "token": 0, "answer": answer})

    def refuse(self, ask: str, error: PlexRLError) -> None:
        """As `answer`, with the error of a request that failed."""
        self.send({"reply": "failed", "operation": ask, "token": 0, "error": error.to_wire()})


@dataclass(frozen=True, slots=True)
class Request:
    """One frame and the connection that it came from."""

    connection: Connection
    header: dict[str, Any]
    payload: bytearray


class Server:
    """Listens on a Unix socket until the process ends."""

    def __init__(self, address: str) -> None:
        self.requests: queue.Queue[Request] = queue.Queue(REQUESTS_MAX)
        Path(address).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address)
        self._socket.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._socket.accept()
            threading.Thread(target=self._read, args=(sock,), daemon=True).start()

    def _read(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        try:
            while True:
                header, payload = recv_frame(sock)
                self.requests.put(Request(connection, header, payload))
        except (PlexRLError, OSError) as error:
            LOG.info("a router's connection ended: %s", error)
        finally:
            sock.close()
