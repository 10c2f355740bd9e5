"""Connections of clients that have not shown a certificate yet: bounded in number and time.

Anybody can open a connection and say nothing. At the bound a new connection replaces the oldest one
of the client address with the most. So a flood replaces its own connections, and a process with a
certificate gets in.
"""

import asyncio
import ipaddress
import logging
import ssl
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

LOG = logging.getLogger(__name__)

HANDSHAKES_MAX = 1024
"""Bound of an asyncio server: all nodes of a large cluster connect at once to one that starts."""
BACKLOG = 1024
OnStreams = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Handshakes:
    """The unfinished handshakes of one listener. Thread-safe."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._lock = threading.Lock()
        self._ends: dict[object, Callable[[], None]] = {}
        self._networks: dict[object, str] = {}
        self._by_network: dict[str, OrderedDict[object, None]] = {}
        """Connections of each client network, oldest first."""

    def begin(self, connection: object, address: str, end: Callable[[], None]) -> None:
        """Admit a connection from a client's address; `end` must end it, from any caller of
        `begin`."""
        network = client_network(address)
        victim: Callable[[], None] | None = None
        with self._lock:
            if len(self._ends) >= self._count_max:
                victim = self._take(self._oldest_of_most(network))
            self._ends[connection], self._networks[connection] = end, network
            self._by_network.setdefault(network, OrderedDict())[connection] = None
        if victim is not None:
            LOG.debug("%d handshakes are unfinished: one is ended", self._count_max)
            victim()

    def ended(self, connection: object) -> None:
        """The handshake has ended, one way or the other."""
        with self._lock:
            if connection in self._ends:
                self._take(connection)

    def _oldest_of_most(self, newcomer: str) -> object:
        # Of several, the newcomer's own network.
        most = max(
            self._by_network, key=lambda each: (len(self._by_network[each]), each == newcomer)
        )
        return next(iter(self._by_network[most]))

    def _take(self, connection: object) -> Callable[[], None]:
        network = self._networks.pop(connection)
        held = self._by_network[network]
        del held[connection]
        if not held:
            del self._by_network[network]
        return self._ends.pop(connection)


class _Accepted(asyncio.Protocol):
    """A connection before its handshake. Nothing is read until then."""

    def __init__(self, on_made: Callable[[asyncio.Transport], None]) -> None:
        self._on_made = on_made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._on_made(transport)


async def start_tls_server(
    on_streams: OnStreams,
    host: str,
    port: int,
    context: ssl.SSLContext,
    *,
    handshake_s: float,
) -> asyncio.Server:
    """As `asyncio.start_server`, with bounded handshakes. A client without a certificate, if
    `context` admits any, counts until `on_streams` returns.

    Raises:
        OSError: the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    handshakes = Handshakes(HANDSHAKES_MAX)
    serving: set[asyncio.Task[None]] = set()

    async def serve(transport: asyncio.Transport) -> None:
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        if transport.is_closing():
            # It was ended already, and `start_tls` would wait for it until its time limit.
            return
        try:
            secure = await loop.start_tls(
                transport, protocol, context, server_side=True, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:
            LOG.info("a connection ended in its handshake: %s", error)
            return
        if secure is None or secure.is_closing():
            # It was ended meanwhile.
            return
        try:
            protocol.connection_made(secure)
            writer = asyncio.StreamWriter(secure, protocol, reader, loop)
            if secure.get_extra_info("ssl_object").getpeercert(binary_form=True):
                handshakes.ended(transport)
            await on_streams(reader, writer)
        except BaseException:
            secure.abort()
            raise

    def ended(transport: asyncio.Transport, task: asyncio.Task[None]) -> None:
        handshakes.ended(transport)
        serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("a bug has ended a connection", exc_info=error)

    def accepted(transport: asyncio.Transport) -> None:
        peer = transport.get_extra_info("peername")
        handshakes.begin(transport, peer[0] if peer else "", transport.abort)
        task = loop.create_task(serve(transport))
        serving.add(task)
        task.add_done_callback(partial(ended, transport))

    return await loop.create_server(lambda: _Accepted(accepted), host, port, backlog=BACKLOG)


def client_network(address: str) -> str:
    """An IPv4 address itself; an IPv6 address's /64, since one client may use all of it."""
    if ":" not in address:
        return address
    parsed = ipaddress.IPv6Address(address.partition("%")[0])
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
