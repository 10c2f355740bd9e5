"""Which connections a router keeps: a bound on all, and one on those of an address.

A connection is *anonymous* until one of its requests has carried a valid key, and *idle* while no
request of it is under way. At a bound a new connection takes the place of the oldest anonymous one,
else of the one that has been idle longest; where there is neither, the new one is closed. So
strangers who hold connections open cannot keep callers with a key out.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

CONNECTIONS_MAX = 16_384
"""Of one router where nothing else is said: some hundred kilobytes of memory each at the worst."""
DESCRIPTORS_KEPT = 256
"""Least number of descriptors left for files, the scheduler and the workers."""


class Connection(Protocol):
    """What is kept count of."""

    def drop(self) -> None:
        """End it at once; `Connections.lost` is told by and by."""
        ...


@dataclass(slots=True)
class _Held:
    """The connections of one address, or of all."""

    count: int = 0
    anonymous: "OrderedDict[Connection, None]" = field(default_factory=OrderedDict)
    """The oldest first."""
    idle: "OrderedDict[Connection, None]" = field(default_factory=OrderedDict)
    """Those with a key, the one that has been idle longest first."""

    def forget(self, connection: Connection) -> None:
        self.anonymous.pop(connection, None)
        self.idle.pop(connection, None)

    def victim(self) -> Connection | None:
        return next(iter(self.anonymous), None) or next(iter(self.idle), None)


class Connections:
    """Those of one router."""

    def __init__(self, connections_max: int, address_connections_max: int) -> None:
        self._connections_max = connections_max
        self._address_connections_max = address_connections_max
        self._all = _Held()
        self._by_address: dict[str, _Held] = {}
        self._addresses: dict[Connection, str] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        return self._all.count

    def admit(self, connection: Connection, address: str) -> bool:
        """Keep a new connection, if need be in the place of another; false where there is no place.

        `address` is the client's.
        """
        network = _network(address)
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

    def authenticated(self, connection: Connection) -> None:
        """A request with a valid key is under way on it."""
        for held in self._held(connection):
            held.forget(connection)

    def became_idle(self, connection: Connection) -> None:
        """Its request, which had a valid key, has been answered."""
        for held in self._held(connection):
            held.idle[connection] = None

    def became_busy(self, connection: Connection) -> None:
        """A request has begun on it; one that is anonymous stays so."""
        for held in self._held(connection):
            held.idle.pop(connection, None)

    def lost(self, connection: Connection) -> None:
        """It has ended."""
        for held in self._held(connection):
            held.forget(connection)
            held.count -= 1
        network = self._addresses.pop(connection, None)
        if network is not None and not self._by_address[network].count:
            del self._by_address[network]

    def shed(self, count: int) -> int:
        """End up to `count` connections that no caller waits on; returns how many were ended."""
        return sum(self._shed(self._all) for _ in range(count))

    def _shed(self, held: _Held) -> bool:
        victim = held.victim()
        if victim is None:
            return False
        self.lost(victim)
        victim.drop()
        return True

    def _held(self, connection: Connection) -> tuple[_Held, ...]:
        network = self._addresses.get(connection)
        return () if network is None else (self._all, self._by_address[network])


def connections_possible(descriptors: int) -> int:
    """How many connections a process may have with so many descriptors."""
    return max(1, descriptors - max(DESCRIPTORS_KEPT, descriptors // 4))


def _network(address: str) -> str:
    """Of an IPv4 address itself; of an IPv6 address the /64, all of which one client may use."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
