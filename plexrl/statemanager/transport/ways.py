"""Which way leads to an address."""

from collections.abc import Collection

from plexrl.statemanager.run_copy import Copier
from plexrl.statemanager.transport.shared_memory import SharedMemory
from plexrl.statemanager.transport.source import LayoutOf, OpenSource
from plexrl.statemanager.transport.tcp_client import Tcp

TCP_SCHEME = "tcp://"


class Ways:
    """Opens a path as shared memory, `tcp://host:port` over TCP."""

    def __init__(self, layout_of: LayoutOf, *, timeout_s: float, secret: bytes = b"") -> None:
        """`secret` is the cluster's, which remote StateManagers ask for."""
        self._copier = Copier()
        self._shared_memory = SharedMemory(self._copier, layout_of, timeout_s)
        self._tcp = Tcp(layout_of, timeout_s, secret)

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> OpenSource:
        """As `Way.open`."""
        if address.startswith(TCP_SCHEME):
            return self._tcp.open(address.removeprefix(TCP_SCHEME), deployment, seq, known)
        return self._shared_memory.open(address, deployment, seq, known)

    def forget_unused(self) -> None:
        """Let go of what no source opened since the last call needed."""
        self._shared_memory.forget_unused()
