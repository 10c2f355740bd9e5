"""Connects and serves: one pair of functions for asyncio, one for blocking sockets.

Over TLS both sides show their certificates. Then the server says in one frame that it accepts the
client, or why not; so a client that is refused knows at once. On a Unix socket nothing is said:
its folder belongs to one user.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from plexrl.errors import (
    AuthenticationError,
    ConnectionLostError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    from_wire,
)
from plexrl.process.children.startup import remove_socket
from plexrl.wire.framing import read_frame, recv_frame, send_frame, write_frame
from plexrl.wire.links.address import Address, TlsAddress, UnixAddress
from plexrl.wire.links.credentials import LOCAL, Credentials, Identity, Role
from plexrl.wire.links.handshakes import BACKLOG, Handshakes, start_tls_server
from plexrl.wire.links.tls_socket import TlsSocket, shut_down

LOG = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 10.0
BLOCKING_HANDSHAKES_MAX = 256
"""Unfinished handshakes of a listener with blocking sockets, which takes a thread for each."""
HANDSHAKES_TIMEOUT_S = 30.0
"""The same for an asyncio server: hundreds of nodes may connect at once to a process that has just
started."""
IDLE_PROBE_S = 5
"""Silence after which the kernel probes whether the other machine is there."""
PROBES = 3
PROBE_S = 3
UNACKNOWLEDGED_MS = 15_000
"""Time after which data that the other machine has not acknowledged ends the connection."""

BlockingSocket = socket.socket | TlsSocket


@dataclass(frozen=True, slots=True)
class Link:
    """A connection and the process at its other end."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    peer: Identity


OnLink = Callable[[Link], Awaitable[None]]


async def connect(
    address: Address,
    credentials: Credentials | None,
    *,
    role: Role,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Link:
    """A link to the process at `address`, which must have `role`.

    Raises:
        AuthenticationError: one side does not accept the other's certificate.
        PlexRLError: the server's refusal.
        OSError: nothing answers there within `timeout_s` seconds.
    """
    if isinstance(address, UnixAddress):
        async with asyncio.timeout(timeout_s):
            return Link(*await asyncio.open_unix_connection(address.path), LOCAL)
    context = client_context(credentials, address)
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
            detect_loss(writer.get_extra_info("socket"))
            shown = writer.get_extra_info("ssl_object").getpeercert()
            peer = needed(credentials, address).admit(shown, writer)
            check_server(address, peer, role)
            answer, _ = await read_frame(reader, payload_bytes_max=0)
            check_accepted(address, answer)
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        raise_refusal(address, error)
        raise
    return Link(reader, writer, peer)


class Server:
    """A listening asyncio server."""

    def __init__(self, listening: asyncio.Server, address: Address) -> None:
        self._listening = listening
        self.address = address
        """The address with the port that the system chose."""

    def close(self) -> None:
        """Stop listening, and remove a Unix socket's file. Open links go on."""
        self._listening.close()
        if isinstance(self.address, UnixAddress):
            remove_socket(self.address.path)


async def serve(
    address: Address, credentials: Credentials | None, on_link: OnLink, *, roles: Collection[Role]
) -> Server:
    """Call `on_link` for each accepted link, from processes of this machine or with one of `roles`.

    Raises:
        OSError: the address cannot be listened on.
    """
    if isinstance(address, UnixAddress):
        remove_socket(address.path)

        async def local(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await on_link(Link(reader, writer, LOCAL))

        listening = await asyncio.start_unix_server(local, address.path, backlog=BACKLOG)
        return Server(listening, address)

    own = needed(credentials, address)

    async def remote(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        detect_loss(writer.get_extra_info("socket"))
        shown = writer.get_extra_info("ssl_object").getpeercert()
        peer, refusal = _greeted(lambda: own.admit(shown, writer), roles)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await write_frame(writer, _greeting(refusal))
        except (TimeoutError, ConnectionLostError):
            peer = None
        if refusal is not None:
            LOG.warning("%s was refused: %s", writer.get_extra_info("peername"), refusal)
        if peer is None:
            writer.close()
            return
        await on_link(Link(reader, writer, peer))

    context = own.server_context()
    listening = await start_tls_server(
        remote, address.host, address.port, context, handshake_s=HANDSHAKES_TIMEOUT_S
    )
    port = listening.sockets[0].getsockname()[1]
    return Server(listening, TlsAddress(address.host, port, address.node))


def connect_blocking(
    address: Address,
    credentials: Credentials | None,
    *,
    role: Role,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> tuple[BlockingSocket, Identity]:
    """As `connect`, for blocking sockets. `timeout_s` stays the socket's timeout."""
    if isinstance(address, UnixAddress):
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.settimeout(timeout_s)
            near.connect(address.path)
        except BaseException:
            near.close()
            raise
        return near, LOCAL
    context = client_context(credentials, address)
    raw = socket.create_connection((address.host, address.port), timeout_s)
    try:
        detect_loss(raw)
        far = TlsSocket(raw, context)
        peer = needed(credentials, address).admit(far.getpeercert(), far)
        check_server(address, peer, role)
        answer, _ = recv_frame(far, payload_bytes_max=0)
        check_accepted(address, answer)
    except BaseException as error:
        raw.close()
        raise_refusal(address, error)
        raise
    return far, peer


class Listener:
    """A listening blocking socket."""

    def __init__(
        self, address: Address, credentials: Credentials | None, roles: Collection[Role]
    ) -> None:
        """Raises:
        OSError: the address cannot be listened on.
        """
        self._roles = roles
        self._handshakes = Handshakes(BLOCKING_HANDSHAKES_MAX)
        if isinstance(address, UnixAddress):
            remove_socket(address.path)
            self._credentials = None
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(address.path)
            self._socket.listen(BACKLOG)
            self.address: Address = address
            return
        self._credentials = needed(credentials, address)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.create_server(
            (address.host, address.port), family=family, backlog=BACKLOG
        )
        port = self._socket.getsockname()[1]
        self.address = TlsAddress(address.host, port, address.node)
        """The address with the port that the system chose."""

    def accept(self) -> socket.socket:
        """The next connection, which `greet` must still admit. Raises `OSError` after `close`."""
        accepted, peer = self._socket.accept()
        if self._credentials is not None:
            self._handshakes.begin(accepted, peer[0], partial(shut_down, accepted))
        return accepted

    def greet(self, accepted: socket.socket) -> tuple[BlockingSocket, Identity]:
        """Admit a connection. May take `HANDSHAKE_TIMEOUT_S`: call it on a thread of its own.

        Raises:
            AuthenticationError, PermissionDeniedError: the client was refused.
            OSError: it has left, or is silent.
        """
        if self._credentials is None:
            return accepted, LOCAL
        try:
            detect_loss(accepted)
            accepted.settimeout(HANDSHAKE_TIMEOUT_S)
            context = self._credentials.server_context()
            secure = TlsSocket(accepted, context, server_side=True)
            own, shown = self._credentials, secure.getpeercert()
            peer, refusal = _greeted(lambda: own.admit(shown, secure), self._roles)
            send_frame(secure, _greeting(refusal))
            if refusal is not None:
                raise refusal
            assert peer is not None
        except BaseException as error:
            accepted.close()
            if isinstance(error, ssl.SSLError):
                raise AuthenticationError(f"a client was refused: {error}") from error
            raise
        finally:
            self._handshakes.ended(accepted)
        secure.settimeout(None)
        return secure, peer

    def refuse(self, accepted: socket.socket) -> None:
        """Close a connection that nothing can `greet`."""
        self._handshakes.ended(accepted)
        accepted.close()

    def close(self) -> None:
        """Stop listening; a waiting `accept` raises. Accepted connections go on."""
        shut_down(self._socket)
        self._socket.close()
        if isinstance(self.address, UnixAddress):
            remove_socket(self.address.path)


def listen_blocking(
    address: Address, credentials: Credentials | None, *, roles: Collection[Role]
) -> Listener:
    """Listen for processes of this machine, or with one of `roles`. Raises `OSError`."""
    return Listener(address, credentials, roles)


def needed(credentials: Credentials | None, address: TlsAddress) -> Credentials:
    """The credentials of a process that uses `address`. Raises `InvalidRequestError`."""
    if credentials is None:
        raise InvalidRequestError(
            f"{address} needs a certificate: set `tls` (ca, certificate, key) in the configuration"
        )
    return credentials


def client_context(credentials: Credentials | None, address: TlsAddress) -> ssl.SSLContext:
    """The TLS context for a connection to `address`.

    Raises:
        InvalidRequestError: this process has no certificate.
        AuthenticationError: its certificate has expired.
    """
    known = needed(credentials, address)
    known.check_expiry()
    return known.client_context()


def _greeted(
    admit: Callable[[], Identity], roles: Collection[Role]
) -> tuple[Identity | None, PlexRLError | None]:
    """The client, or why it is refused."""
    try:
        peer = admit()
    except AuthenticationError as error:
        return None, error
    if peer.role in roles:
        return peer, None
    wanted = " or ".join(sorted(roles))
    return None, PermissionDeniedError(f"this port is for a {wanted}, and the client is {peer}")


def _greeting(refusal: PlexRLError | None) -> dict[str, Any]:
    return {"accepted": True} if refusal is None else {"error": refusal.to_wire()}


def check_accepted(address: Address, answer: dict[str, Any]) -> None:
    """Raises the server's refusal, if its first frame is one."""
    if "error" in answer:
        raise from_wire(answer["error"])
    if answer != {"accepted": True}:
        raise AuthenticationError(f"{address} does not speak PlexRL's protocol: check the port")


def check_server(address: TlsAddress, peer: Identity, role: Role) -> None:
    """Raises `AuthenticationError` if `peer` is not the process that the address means."""
    if peer.role != role or (address.node and peer != Identity(Role.NODE, address.node)):
        wanted = Identity(role, address.node)
        raise AuthenticationError(f"{address} is {peer}, not {wanted}: check the address")


def raise_refusal(address: Address, error: BaseException) -> None:
    """Raise the typed error for a failed handshake; return if it is none."""
    cause = error.__cause__ if isinstance(error, ConnectionLostError) else error
    if isinstance(cause, ssl.SSLError):
        raise AuthenticationError(
            f"{address} and this process do not accept each other's certificates: {cause}: both "
            "need valid ones of the same cluster"
        ) from error
    if isinstance(error, ConnectionLostError):
        # Before the greeting this is no more than an address where nobody serves.
        raise ConnectionResetError(
            f"{address} closed the connection at once: if it goes on, see the log of the process "
            "there, which may not accept this process's certificate"
        ) from error


def detect_loss(connected: socket.socket) -> None:
    """End the connection within seconds if the other machine vanishes without a word."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
