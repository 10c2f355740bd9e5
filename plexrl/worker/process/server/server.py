"""A worker's socket: one thread per connection reads frames into a queue for the main thread.

Every request names the worker that it is for. An address may have belonged to another worker
before, so a request for any other is refused, and its connection ends.

A payload may come ahead of its run, while the scheduler still journals the operation. It waits here
and has no effect before the run is requested.
"""

import logging
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from plexrl.errors import InvalidRequestError, PlexRLError, WrongWorkerError
from plexrl.wire.framing import Buffer, Header, recv_frame_or_file, send_frame
from plexrl.wire.links.address import Address
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import BlockingSocket, listen_blocking
from plexrl.wire.messages import Answer, Failed, WorkerName, frame_header

LOG = logging.getLogger(__name__)

Payload = bytearray | memoryview
"""Received bytes, or the mapping of a file that the router passed."""
REQUESTS_MAX = 1024
ACCEPT_RETRY_S = 0.1


class WorkerConnection:
    """The connection of one router. A router that is gone is no error: another one retries."""

    def __init__(self, sock: BlockingSocket) -> None:
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
        self.send(frame_header(Answer(operation=ask, token=0, answer=answer)))

    def refuse(self, ask: str, error: PlexRLError) -> None:
        """As `answer`, with the error of a request that failed."""
        self.send(frame_header(Failed(operation=ask, token=0, error=error.to_wire())))


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One frame and the connection that it came from."""

    connection: WorkerConnection
    header: dict[str, Any]
    payload: Payload


class StagedPayload:
    """The payload that one connection has sent ahead of its run; at most one, and it ends with the
    connection.

    A frame `stage` replaces it; an empty one discards it. A run names it in place of a payload of
    its own. A run with its own payload discards it, because the run of the staged one would have
    come first.
    """

    def __init__(self) -> None:
        self._name = ""
        self._payload: Payload = bytearray()

    def payload_of(self, header: Header, payload: Payload) -> Payload | None:
        """The payload of a request that has come with `payload`; None: the frame was a `stage`.

        Raises:
            InvalidRequestError: the request names a payload that is not here.
        """
        if header.get("request") == "stage":
            self._name, self._payload = str(header.get("payload")), payload
            return None
        name = header.get("staged")
        if name is None and not payload:
            return payload
        if name is not None:
            if name != self._name:
                raise InvalidRequestError(f"the payload {name!r} is not here: send it with the run")
            payload = self._payload
        self._name, self._payload = "", bytearray()
        return payload


class WorkerServer:
    """Listens until the process ends; over TLS for routers only."""

    def __init__(
        self, address: Address, worker: WorkerName, credentials: Credentials | None = None
    ) -> None:
        """Raises:
        OSError: the address cannot be listened on.
        """
        self.requests: queue.Queue[ReceivedRequest] = queue.Queue(REQUESTS_MAX)
        self._worker = worker
        self._listener = listen_blocking(address, credentials, roles=(Role.ROUTER,))
        self.address = self._listener.address
        """The address with the port that the system chose."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                accepted = self._listener.accept()
            except OSError as error:
                # The client has left before, or this process has too many open files now.
                LOG.warning("a connection could not be accepted: %s", error)
                time.sleep(ACCEPT_RETRY_S)
                continue
            try:
                threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()
            except RuntimeError as error:
                # There are too many threads now; routers connect again.
                LOG.warning("a connection was refused: %s", error)
                self._listener.refuse(accepted)

    def _serve(self, accepted: socket.socket) -> None:
        try:
            sock, peer = self._listener.greet(accepted)
        except (PlexRLError, OSError) as error:
            LOG.warning("a connection was refused: %s", error)
            return
        LOG.info("%s is connected", peer)
        self._read(sock)

    def _read(self, sock: BlockingSocket) -> None:
        connection = WorkerConnection(sock)
        staged = StagedPayload()
        try:
            while True:
                header, payload = recv_frame_or_file(sock)
                if not self._is_mine(header):
                    connection.send({"reply": "refused", "error": self._refusal(header).to_wire()})
                    return
                own = staged.payload_of(header, payload)
                if own is not None:
                    self.requests.put(ReceivedRequest(connection, header, own))
        except (PlexRLError, OSError) as error:
            LOG.info("a router's connection ended: %s", error)
        finally:
            sock.close()

    def _is_mine(self, header: Header) -> bool:
        return header.get("worker") == list(self._worker)

    def _refusal(self, header: Header) -> WrongWorkerError:
        error = WrongWorkerError(
            f"the request is for worker {header.get('worker')}, and this address belongs to "
            f"{list(self._worker)} now: ask the scheduler for the worker's address"
        )
        LOG.warning("%s", error)
        return error
