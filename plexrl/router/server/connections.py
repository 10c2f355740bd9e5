"""Which connections a router keeps, within a bound on all and a bound on each client address.

A connection is *anonymous* until one of its requests has carried a valid key, and *idle* while it
has no request in progress. At a bound a new connection replaces the oldest anonymous one, or else
the one that has been idle longest; if there is neither, the new connection is closed. So anonymous
clients that hold connections open cannot lock out clients with a key.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from plexrl.wire.links.handshakes import client_network

CONNECTIONS_MAX = 16_384
"""Default bound of one router. A connection takes some hundred kilobytes of memory at worst."""
DESCRIPTORS_KEPT = 256
"""Least number of descriptors kept free for files, the scheduler and the workers."""


class HttpConnection(Protocol):
    """A connection that can be closed."""

    def drop(self) -> None:
        """Close the connection at once; `Connections.lost` is called a little later."""
        ...


@dataclass(slots=True)
class _Held:
    """The connections of one address, or of all addresses."""

    count: int = 0
    anonymous: "OrderedDict[HttpConnection, None]" = field(default_factory=OrderedDict)
    """Oldest first."""
    idle: "OrderedDict[HttpConnection, None]" = field(default_factory=OrderedDict)
    """Connections with a key, longest idle first."""

    def forget(self, connection: HttpConnection) -> None:
        self.anonymous.pop(connection, None)
        self.idle.pop(connection, None)

    def victim(self) -> HttpConnection | None:
        return next(iter(self.anonymous), None) or next(iter(self.idle), None)


class Connections:
    """All connections of one router."""

    def __init__(self, connections_max: int, address_connections_max: int) -> None:
        self._connections_max = connections_max
        self._address_connections_max = address_connections_max
        self._all = _Held()
        self._by_address: dict[str, _Held] = {}
        self._addresses: dict[HttpConnection, str] = {}

    @property
    def count(self) -> int:
        """Number of open connections."""
        return self._all.count

    def admit(self, connection: HttpConnection, address: str) -> bool:
        """Keep a new connection, if needed in place of another; False if it must be closed.

        `address` is the client's.
        """
        network = client_network(address)
        own = self._by_address.get(network)
        if own is not None and own.count >= self._address_connections_max and not self._shed(own):
            return False
        if self._all.count >= self._connections_max and not self._shed(self._all):
            return False
        own = self._by_address.setdefault(network, _Held())
        self._addresses[connection] = network
        for held in (self._all, own):
            held.count += 1
            held.anonymous[connection] = None
        return True

    def authenticated(self, connection: HttpConnection) -> None:
        """Record that a request with a valid key is in progress on the connection."""
        for held in self._held(connection):
            held.forget(connection)

    def became_idle(self, connection: HttpConnection) -> None:
        """Record that a request with a valid key has been answered on the connection."""
        for held in self._held(connection):
            held.idle[connection] = None

    def became_busy(self, connection: HttpConnection) -> None:
        """Record that a request has begun on the connection; an anonymous one stays anonymous."""
        for held in self._held(connection):
            held.idle.pop(connection, None)

    def lost(self, connection: HttpConnection) -> None:
        """Forget a connection that has ended."""
        for held in self._held(connection):
            held.forget(connection)
            held.count -= 1
        network = self._addresses.pop(connection, None)
        if network is not None and not self._by_address[network].count:
            del self._by_address[network]

    def shed(self, count: int) -> int:
        """Close up to `count` anonymous or idle connections; return how many were closed."""
        return sum(self._shed(self._all) for _ in range(count))

    def _shed(self, held: _Held) -> bool:
        victim = held.victim()
        if victim is None:
            return False
        self.lost(victim)
        victim.drop()
        return True

    def _held(self, connection: HttpConnection) -> tuple[_Held, ...]:
        network = self._addresses.get(connection)
        return () if network is None else (self._all, self._by_address[network])


def connections_possible(descriptors: int) -> int:
    """How many connections a process may have with this many descriptors."""
    return max(1, descriptors - max(DESCRIPTORS_KEPT, descriptors // 4))
