"""The way to a StateManager on another node: TCP, one or several streams."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from plexrl.errors import ConnectionLostError, InvalidRequestError, from_wire
from plexrl.statemanager.keys import StateSlice
from plexrl.statemanager.layout import Layout
from plexrl.statemanager.run_copy import Bytes
from plexrl.statemanager.runs import Runs
from plexrl.statemanager.transport.handshake import greet_server
from plexrl.statemanager.transport.run_stream import (
    DIGEST_BYTES,
    Digest,
    encode_runs,
    receive_runs,
)
from plexrl.statemanager.transport.sockets import set_timeout
from plexrl.statemanager.transport.source import LayoutOf, Shard, ShardRuns
from plexrl.wire.framing import recv_head, send_frame

BYTES_PER_S = 3e9
REQUEST_S = 20e-6
BATCH_BYTES = 32 << 20
"""One request's bytes: what is asked for again when a source is lost on the way."""
BATCH_RUNS = 1024
"""Keeps two requests within the socket's buffers, so that both ends never wait to send."""
ANSWER_BYTES_MAX = 256 << 20


class _Offered(msgspec.Struct):
    rank: int
    stamp: str
    nbytes: int
    layout: str
    slices: tuple[StateSlice, ...] | None


class Tcp:
    """Opens sources by `host:port`."""

    def __init__(
        self,
        layout_of: LayoutOf,
        timeout_s: float,
        secret: bytes,
        *,
        streams: int = 1,
        verify: bool = False,
    ) -> None:
        """`timeout_s` bounds each wait on a socket. `streams` to each source gain where one does
        not fill the network. With `verify` every batch is checked against the sender's digest of
        it, which TCP's own checksum is too weak for at these volumes."""
        self._layout_of = layout_of
        self._timeout_s = timeout_s
        self._secret = secret
        self._streams = streams
        self._verify = verify

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> "TcpSource":
        """As `Way.open`."""
        connections: list[socket.socket] = []
        try:
            while len(connections) < self._streams:
                connections.append(_connect(address, self._secret, self._timeout_s))
            request = {"type": "open", "source": deployment, "seq": seq, "known": list(known)}
            offers = [_offers(connection, request) for connection in connections]
            stamps = [[shard.stamp for shard in offered] for offered in offers]
            if any(each != stamps[0] for each in stamps):
                raise ConnectionLostError(f"{address} published the version again meanwhile")
            shards = tuple(_shard(offered, self._layout_of) for offered in offers[0])
            return TcpSource(f"tcp://{address}", connections, shards, self._verify)
        except BaseException:
            for connection in connections:
                connection.close()
            raise


class TcpSource:
    """An `OpenSource` on another node."""

    def __init__(
        self,
        address: str,
        connections: list[socket.socket],
        shards: tuple[Shard, ...],
        verify: bool,
    ) -> None:
        self.address = address
        self.shards = shards
        self.bytes_per_s = BYTES_PER_S
        self.request_s = REQUEST_S
        # The daemon itself held the version while it sent these bytes.
        self.arrives_whole = True
        self._connections = connections
        self._verify = verify

    def read(
        self, parts: tuple[ShardRuns, ...], target: Bytes, arrived: Callable[[Runs], None]
    ) -> None:
        """As `OpenSource.read`."""
        batches = deque(
            (part.shard, few)
            for part in parts
            for batch in part.runs.batches(BATCH_BYTES)
            for few in _at_most(batch, BATCH_RUNS)
        )
        lock = threading.Lock()

        def tell(runs: Runs) -> None:
            with lock:
                arrived(runs)

        if len(self._connections) == 1 or len(batches) < 2:
            self._stream(self._connections[0], batches, target, tell)
            return
        with ThreadPoolExecutor(len(self._connections)) as pool:
            streams = [
                pool.submit(self._stream, connection, batches, target, tell)
                for connection in self._connections
            ]
            for stream in streams:
                stream.result()

    def confirm(self) -> None:
        """As `OpenSource.confirm`."""
        for connection in self._connections:
            send_frame(connection, {"type": "confirm"})
            _answer(connection, 0)

    def close(self) -> None:
        """As `OpenSource.close`."""
        for connection in self._connections:
            connection.close()

    def _stream(
        self,
        connection: socket.socket,
        batches: deque[tuple[int, Runs]],
        target: Bytes,
        arrived: Callable[[Runs], None],
    ) -> None:
        """Take batches until there are none, one asked for while another arrives."""
        asked: deque[Runs] = deque()
        while True:
            while len(asked) < 2 and batches:
                try:
                    shard, runs = batches.popleft()
                except IndexError:
                    # Another stream took the last one.
                    break
                self._ask(connection, shard, runs)
                asked.append(runs)
            if not asked:
                return
            runs = asked.popleft()
            expected = runs.nbytes + (DIGEST_BYTES if self._verify else 0)
            _answer(connection, expected)
            receive_runs(connection, runs, target, Digest(self._verify))
            arrived(runs)

    def _ask(self, connection: socket.socket, shard: int, runs: Runs) -> None:
        header = {
            "type": "read",
            "shard": shard,
            "stamp": self.shards[shard].stamp,
            "verify": self._verify,
        }
        send_frame(connection, header, encode_runs(runs))


def _connect(address: str, secret: bytes, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise InvalidRequestError(f"a remote StateManager is tcp://host:port, not {address!r}")
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    try:
        # From here on a blocking socket, whose waits the kernel bounds.
        connection.settimeout(None)
        set_timeout(connection, timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet_server(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def _offers(connection: socket.socket, request: dict[str, Any]) -> list[_Offered]:
    send_frame(connection, request)
    answer = _answer(connection, 0)
    return msgspec.convert(answer["shards"], list[_Offered])


def _answer(connection: socket.socket, payload_bytes: int) -> dict[str, Any]:
    """The head of an answer, whose payload is still to come and must have this size."""
    header, announced = recv_head(connection, payload_bytes_max=ANSWER_BYTES_MAX)
    if "error" in header:
        raise from_wire(header["error"])
    if announced != payload_bytes:
        raise ConnectionLostError(f"{announced} bytes were announced, not {payload_bytes}")
    result: dict[str, Any] = header["result"]
    return result


def _shard(offered: _Offered, layout_of: LayoutOf) -> Shard:
    layout = layout_of(offered.layout) if offered.slices is None else Layout.of(offered.slices)
    if layout is None or layout.digest != offered.layout:
        raise ConnectionLostError("the source answered with a layout that was not asked for")
    return Shard(rank=offered.rank, stamp=offered.stamp, layout=layout, nbytes=offered.nbytes)


def _at_most(runs: Runs, count: int) -> list[Runs]:
    return [runs.chosen(slice(at, at + count)) for at in range(0, len(runs), count)]
