"""How a process reaches the StateManagers of other nodes, and how a StateManager serves them.

By mutual TLS, unless the node's configuration declares the network trusted (`fabric = "trusted"`):
then by plain TCP. An unencrypted address is refused without that declaration.
"""

import socket
from dataclasses import dataclass
from typing import Protocol

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.protocol.address import NIXL_SCHEME, TCP_SCHEME, TLS_SCHEME
from plexrl.wire.links.address import TlsAddress, host_port, parse_address
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles
from plexrl.wire.links.dial import (
    CONNECT_TIMEOUT_S,
    BlockingSocket,
    connect_blocking,
    detect_loss,
    listen_blocking,
)

TRUSTED = "trusted"
"""The value of `fabric` that declares a network trusted."""
BACKLOG = 128


class Listening(Protocol):
    """A listening socket for other nodes."""

    @property
    def address(self) -> object:
        """The address at which it listens, with the port that the system chose."""
        ...

    def accept(self) -> socket.socket:
        """The next connection, which `greet` must still admit. Raises `OSError` after `close`."""
        ...

    def greet(self, accepted: socket.socket) -> tuple[BlockingSocket, Identity]:
        """Admit a connection, on a thread of its own.

        Raises:
            AuthenticationError, PermissionDeniedError: it is no node of this cluster.
            OSError: it has left, or is silent.
        """
        ...

    def refuse(self, accepted: socket.socket) -> None:
        """Close a connection that nothing can `greet`."""
        ...

    def close(self) -> None:
        """Stop listening; accepted connections go on."""
        ...


@dataclass(frozen=True, slots=True)
class Network:
    """A process's way to other nodes. Without certificate and trust there is none."""

    credentials: Credentials | None = None
    is_trusted: bool = False

    @classmethod
    def of(cls, tls: TlsFiles | None, fabric: str) -> "Network":
        """The network that the fields of a configuration describe. Raises `InvalidRequestError`."""
        return cls(None if tls is None else Credentials(tls), fabric == TRUSTED)

    def connect(self, address: str, timeout_s: float) -> BlockingSocket:
        """A connection to the StateManager at a remote address; `timeout_s` bounds each wait.

        Raises:
            InvalidRequestError: this process cannot or may not use such an address.
            AuthenticationError: another process than that node's answers, or it refuses this one.
            OSError: nothing answers there.
        """
        connecting_s = min(timeout_s, CONNECT_TIMEOUT_S)
        if address.startswith(TLS_SCHEME):
            parsed = parse_address(address)
            secure, _ = connect_blocking(
                parsed, self.credentials, role=Role.NODE, timeout_s=connecting_s
            )
            secure.settimeout(timeout_s)
            return secure
        if not self.is_trusted:
            raise InvalidRequestError(
                f"{address} is not encrypted, and this node's configuration does not declare its "
                f'network trusted: set fabric = "{TRUSTED}" on all nodes, or on none'
            )
        plain = socket.create_connection(_host_and_port(address), timeout=connecting_s)
        detect_loss(plain)
        plain.settimeout(timeout_s)
        return plain

    def listen(self, node: str, listen: str) -> Listening:
        """Serve other nodes at `listen` (`host:port`; port 0: any free port).

        Raises:
            InvalidRequestError: `listen` is malformed, or there is neither certificate nor trust.
            OSError: it cannot be listened on.
        """
        host, port = _host_and_port(listen)
        if self.is_trusted:
            return _PlainListener(host, port)
        address = TlsAddress(host, port, node)
        return listen_blocking(address, self.credentials, roles=(Role.NODE,))


NO_NETWORK = Network()
"""For a process of a cluster on one machine."""


class _PlainListener:
    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        port = self._socket.getsockname()[1]
        self.address = f"{TCP_SCHEME}{host_port(host, port)}"

    def accept(self) -> socket.socket:
        return self._socket.accept()[0]

    def greet(self, accepted: socket.socket) -> tuple[BlockingSocket, Identity]:
        detect_loss(accepted)
        # Whoever reaches this port counts as a node; its ticket says what it may read.
        return accepted, Identity(Role.NODE)

    def refuse(self, accepted: socket.socket) -> None:
        accepted.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def remote_address(
    node: str, host: str, port: int, *, fabric: str = "", serves_nixl: bool = False
) -> str:
    """The address at which other nodes reach the StateManager of `node`, for its agent."""
    if fabric != TRUSTED:
        return str(TlsAddress(host, port, node))
    scheme = NIXL_SCHEME if serves_nixl else TCP_SCHEME
    return f"{scheme}{host_port(host, port)}"


def _host_and_port(text: str) -> tuple[str, int]:
    """Host and port of `[scheme://]host:port`; an IPv6 host is in brackets."""
    host, _, port = text.removeprefix(TCP_SCHEME).removeprefix(NIXL_SCHEME).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequestError(
            f"{text!r} is not host:port: the address of a StateManager is tls://NODE@HOST:PORT or "
            "tcp://HOST:PORT, and it listens on HOST:PORT"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
