"""TCP server for other nodes: one blocking thread per connection, zero-copy where possible.

After the handshake a client sends frames (`tcp.requests`); each is answered by one frame.
The answer to a failed request is `{error}`. A failure after a payload has begun ends the
connection.
"""

import logging
import socket
import threading
from contextlib import ExitStack, suppress

from plexrl.errors import ConnectionLostError, InvalidRequestError, PlexRLError
from plexrl.statemanager.daemon.handlers.caller import Services
from plexrl.statemanager.transfer.transport.handshake import greet_client
from plexrl.statemanager.transfer.transport.nixl import NixlLender
from plexrl.statemanager.transfer.transport.tcp.requests import Requests
from plexrl.statemanager.transfer.transport.tcp.sockets import set_timeout

LOG = logging.getLogger(__name__)

TIMEOUT_S = 60
"""Timeout of a client in the middle of a message."""
HANDSHAKE_TIMEOUT_S = 5
ACCEPT_AGAIN_S = 0.1
"""Delay before the next accept after one failed, for example for lack of descriptors."""


class TcpServer:
    """Serves from construction until `close`."""

    def __init__(
        self,
        services: Services,
        listen: str,
        lender: NixlLender | None = None,
    ) -> None:
        """`listen` is `host:port`. A `lender` enables RDMA reads.

        Raises:
            InvalidRequestError: `listen` is malformed.
        """
        self._services = services
        self._connections_max = services.config.connections_max
        self._lender = lender
        self._lock = threading.Lock()
        self._served: set[socket.socket] = set()
        self._closing = threading.Event()
        host, _, port = listen.rpartition(":")
        if not port.isdecimal():
            raise InvalidRequestError(f"serve_tcp is host:port, not {listen!r}")
        self._socket = socket.create_server((host, int(port)), backlog=128)
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        """Listening address, with the port that the system chose."""
        threading.Thread(target=self._accept, name="plexrl-tcp", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and end every connection; readers go to another source."""
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            served = list(self._served)
        for connection in served:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                # Either `close` shut the socket down, or the failure is temporary.
                if self._closing.wait(ACCEPT_AGAIN_S):
                    return
                LOG.warning("no remote reader can be accepted: %s", error)
                continue
            with self._lock:
                is_full = len(self._served) >= self._connections_max
                if not is_full:
                    self._served.add(connection)
            if is_full:
                LOG.warning("%s was refused: %d connections", peer, self._connections_max)
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as error:
                LOG.warning("%s was refused: %s", peer, error)
                with self._lock:
                    self._served.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            set_timeout(connection, HANDSHAKE_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            claims = greet_client(connection, self._services.key)
            # A client may hold a version without limit while it is alive.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            set_timeout(connection, 0, sending_s=TIMEOUT_S)
            with ExitStack() as leases:
                requests = Requests(self._services, claims, leases, self._lender)
                while True:
                    requests.answer(connection)
        except ConnectionLostError:
            LOG.debug("a remote reader left")
        except (OSError, PlexRLError) as error:
            LOG.warning("a remote reader was cut off: %s", error)
        finally:
            with self._lock:
                self._served.discard(connection)
            connection.close()
