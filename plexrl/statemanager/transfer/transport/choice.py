"""Choice of the transport by the address."""

from collections.abc import Collection

from plexrl.statemanager.protocol.address import TCP_SCHEME, nearest
from plexrl.statemanager.transfer.copy.strided_copy import Copier
from plexrl.statemanager.transfer.transport.nixl import Nixl
from plexrl.statemanager.transfer.transport.shared_memory import SharedMemory
from plexrl.statemanager.transfer.transport.source import LayoutOf, OpenSource
from plexrl.statemanager.transfer.transport.tcp.client import Tcp

NIXL_SCHEME = "nixl://"


class Transports:
    """Opens a socket path by shared memory, `tcp://host:port` over TCP, and `nixl://host:port` over
    RDMA, where the port is the source's TCP port."""

    def __init__(self, layout_of: LayoutOf, *, ticket: bytes, timeout_s: float) -> None:
        """`ticket` authenticates the reader."""
        self._copier = Copier()
        self._timeout_s = timeout_s
        self._shared_memory = SharedMemory(self._copier, layout_of, ticket, timeout_s)
        self._tcp = Tcp(layout_of, timeout_s, ticket)
        self._nixl: Nixl | None = None

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> OpenSource:
        """As `Transport.open`.

        Raises:
            UnavailableError: the address needs NIXL, which is not installed.
        """
        address = nearest(address)
        if address.startswith(TCP_SCHEME):
            return self._tcp.open(address.removeprefix(TCP_SCHEME), deployment, seq, known)
        if address.startswith(NIXL_SCHEME):
            if self._nixl is None:
                self._nixl = Nixl(self._tcp, self._timeout_s)
            return self._nixl.open(address.removeprefix(NIXL_SCHEME), deployment, seq, known)
        return self._shared_memory.open(address, deployment, seq, known)

    def close(self) -> None:
        """Release the target and the mappings; the object stays usable."""
        self._shared_memory.forget_unused()
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None

    def forget_unused(self) -> None:
        """Unmap files that no source used since the last call."""
        self._shared_memory.forget_unused()


def transport_of(address: str) -> str:
    """The name of an address's transport: `tcp`, `nixl` or `shared_memory`."""
    scheme, has_scheme, _ = address.partition("://")
    return scheme if has_scheme else "shared_memory"
