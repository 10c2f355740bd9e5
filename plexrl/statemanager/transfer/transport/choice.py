"""Choice of the transport by the address."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack

from plexrl.errors import ConnectionLostError, UnavailableError
from plexrl.statemanager.bytes.strided_copy import Copier
from plexrl.statemanager.protocol.address import NIXL_SCHEME, is_remote, nearest
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.store.receiving.reader import LayoutOf, StateReader, VersionReader
from plexrl.statemanager.transfer.transport.nixl import Nixl
from plexrl.statemanager.transfer.transport.shared_memory import SharedMemory, open_neighbour
from plexrl.statemanager.transfer.transport.tcp.client import Tcp, TcpConnection
from plexrl.statemanager.transfer.transport.tcp.state import open_states

TIMEOUT_S = 30.0
"""Timeout of another StateManager's answer."""


class Transports:
    """Opens a socket path by shared memory, and a remote address over TLS, TCP or RDMA."""

    def __init__(
        self, network: Network, layout_of: LayoutOf, *, ticket: bytes, timeout_s: float
    ) -> None:
        """`ticket` authenticates the reader."""
        self._copier = Copier()
        self._timeout_s = timeout_s
        self._shared_memory = SharedMemory(self._copier, layout_of, ticket, timeout_s)
        self._tcp = Tcp(network, layout_of, timeout_s, ticket)
        self._nixl: Nixl | None = None

    def open(
        self, held: ExitStack, address: str, deployment: str, seq: int, known: Collection[str]
    ) -> Sequence[VersionReader]:
        """As `Transport.open`.

        Raises:
            UnavailableError: the address needs NIXL, which is not installed.
        """
        address = nearest(address)
        if address.startswith(NIXL_SCHEME):
            if self._nixl is None:
                self._nixl = Nixl(self._tcp, self._timeout_s)
            return self._nixl.open(held, address, deployment, seq, known)
        if is_remote(address):
            return self._tcp.open(held, address, deployment, seq, known)
        return self._shared_memory.open(held, address, deployment, seq, known)

    def close(self) -> None:
        """Release the target and the mappings; the object stays usable."""
        self._shared_memory.forget_unused()
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None

    def forget_unused(self) -> None:
        """Unmap files that no reader used since the last call."""
        self._shared_memory.forget_unused()


def open_elsewhere(
    held: ExitStack, network: Network, address: str, ticket: bytes, deployment: str, seq: int
) -> Sequence[StateReader]:
    """Readers of the state versions at another StateManager, valid while `held` is open.

    `address` is the path of its socket on this machine, or a remote address. `ticket` is an
    agent's; on this machine it is shown only to daemons of this process's user, since a worker may
    have named the address.

    Raises:
        PermissionDeniedError: another user listens there.
        UnavailableError: the StateManager cannot be reached.
    """
    try:
        near = nearest(address)
        if not is_remote(near):
            return open_neighbour(held, near, ticket, deployment, seq, TIMEOUT_S)
        connection = TcpConnection(network, near, ticket, TIMEOUT_S)
        held.callback(connection.close)
        return open_states(connection, deployment, seq)
    except (ConnectionLostError, OSError) as error:
        raise UnavailableError(
            f"the StateManager at {address} cannot be reached ({error}): see its log",
            statemanager=address,
        ) from error


def transport_of(address: str) -> str:
    """The name of an address's transport: `tls`, `tcp`, `nixl` or `shared_memory`."""
    scheme, has_scheme, _ = address.partition("://")
    return scheme if has_scheme else "shared_memory"
