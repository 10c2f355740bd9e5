"""Server for other nodes: one blocking thread per connection, zero-copy where possible.

After the handshakes of TLS and of tickets, a client sends frames (`tcp.requests`); each is answered
by one frame. The answer to a failed request is `{error}`. A failure after a payload has begun ends
the connection.
"""

import logging
import socket
import threading
from contextlib import ExitStack, suppress

from plexrl.errors import ConnectionLostError, OverloadedError, PlexRLError
from plexrl.statemanager.daemon.handlers.caller import Services
from plexrl.statemanager.daemon.tcp.requests import REQUEST_BYTES_MAX, Requests
from plexrl.statemanager.protocol.address import NIXL_SCHEME, TCP_SCHEME
from plexrl.statemanager.transfer.transport.handshake import greet_client
from plexrl.statemanager.transfer.transport.nixl import NixlLender
from plexrl.statemanager.transfer.transport.tcp.sockets import bound_waits
from plexrl.wire.framing import recv_frame
from plexrl.wire.links.dial import BlockingSocket

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
        lender: NixlLender | None = None,
    ) -> None:
        """Listens at the `serve_tcp` of the configuration. A `lender` enables RDMA reads.

        Raises:
            InvalidRequestError: the configuration is malformed.
            OSError: it cannot be listened on.
        """
        self._services = services
        config = services.config
        self._connections_max = config.connections_max
        self._lender = lender
        self._lock = threading.Lock()
        self._served: set[BlockingSocket] = set()
        self._closing = threading.Event()
        self._listening = services.network.listen(config.node, config.serve_tcp)
        address = str(self._listening.address)
        self.address = address if lender is None else address.replace(TCP_SCHEME, NIXL_SCHEME)
        """Listening address, with the port that the system chose."""
        threading.Thread(target=self._accept, name="plexrl-tcp", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and end every connection; readers go to another source."""
        self._closing.set()
        self._listening.close()
        with self._lock:
            served = list(self._served)
        for connection in served:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listening.accept()
            except OSError as error:
                # Either `close` shut the socket down, or the failure is temporary.
                if self._closing.wait(ACCEPT_AGAIN_S):
                    return
                LOG.warning("no remote reader can be accepted: %s", error)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as error:
                LOG.warning("a reader was refused: %s", error)
                self._listening.refuse(connection)

    def _serve(self, accepted: socket.socket) -> None:
        connection: BlockingSocket = accepted
        try:
            connection = self._greeted(accepted)
            bound_waits(connection, HANDSHAKE_TIMEOUT_S)
            claims = greet_client(connection, self._services.key)
            with ExitStack() as leases:
                requests = Requests(self._services, claims, leases, self._lender)
                while True:
                    # A client may hold a version without limit while its machine is there.
                    bound_waits(connection, 0)
                    header, payload = recv_frame(connection, payload_bytes_max=REQUEST_BYTES_MAX)
                    bound_waits(connection, TIMEOUT_S)
                    requests.answer(connection, header, payload)
        except ConnectionLostError:
            LOG.debug("a remote reader left")
        except (OSError, PlexRLError) as error:
            LOG.warning("a remote reader was cut off: %s", error)
        finally:
            with self._lock:
                self._served.discard(connection)
            connection.close()

    def _greeted(self, accepted: socket.socket) -> BlockingSocket:
        try:
            connection, _ = self._listening.greet(accepted)
        except PlexRLError as error:
            self._services.counters.count_refusal(error.code)
            raise
        with self._lock:
            is_full = len(self._served) >= self._connections_max
            if not is_full:
                self._served.add(connection)
        if is_full:
            connection.close()
            raise OverloadedError(f"{self._connections_max} readers are connected")
        if self._closing.is_set():
            connection.close()
            raise ConnectionLostError("this StateManager ends")
        return connection
