"""The way to a StateManager on another node: TCP, one or several streams."""

import socket
import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from plexrl.errors import ConnectionLostError, InvalidRequestError, from_wire
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.strided_copies import Runs
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.delta.stream import apply_delta
from plexrl.statemanager.transfer.transport.handshake import greet_server
from plexrl.statemanager.transfer.transport.run_stream import (
    ANSWER_BYTES_MAX,
    DIGEST_BYTES,
    Digest,
    encode_runs,
    receive_bytes,
    receive_runs,
)
from plexrl.statemanager.transfer.transport.source import Arrived, LayoutOf, Shard, ShardRuns
from plexrl.statemanager.transfer.transport.tcp.sockets import set_timeout
from plexrl.wire.framing import recv_head, send_frame

BYTES_PER_S = 3e9
REQUEST_S = 20e-6
BATCH_BYTES = 32 << 20
"""One request's bytes: what is asked for again when a source is lost on the way."""
BATCH_RUNS = 1024
"""Keeps two requests within the socket's buffers, so that both ends never wait to send."""


class _Offered(msgspec.Struct):
    rank: int
    stamp: str
    nbytes: int
    layout: str
    slices: tuple[StateSlice, ...] | None


class _Batch(NamedTuple):
    """What one request asks for. What may come as a delta is always verified: a target whose bytes
    are not those of the base after all is brought in whole then."""

    shard: int
    runs: Runs
    base: str | None
    delta: DeltaPolicy | None
    verify: bool


class Tcp:
    """Opens sources by `host:port`."""

    def __init__(
        self,
        layout_of: LayoutOf,
        timeout_s: float,
        ticket: bytes,
        *,
        streams: int = 1,
        verify: bool = False,
    ) -> None:
        """`timeout_s` bounds each wait on a socket. `streams` to each source gain where one does
        not fill the network. With `verify` every batch is checked against the sender's digest of
        it, which TCP's own checksum is too weak for at these volumes."""
        self._layout_of = layout_of
        self._timeout_s = timeout_s
        self._ticket = ticket
        self._streams = streams
        self._verify = verify

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> "TcpSource":
        """As `Way.open`."""
        connections: list[socket.socket] = []
        try:
            while len(connections) < self._streams:
                connections.append(connect_tcp(address, self._ticket, self._timeout_s))
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
        self,
        parts: tuple[ShardRuns, ...],
        target: Bytes,
        arrived: Arrived,
        delta: DeltaPolicy | None = None,
    ) -> None:
        """As `OpenSource.read`."""
        batches = deque(
            _Batch(part.shard, few, base, delta, self._verify or base is not None)
            for part in parts
            for base in (None if delta is None else part.base,)
            for batch in part.runs.batches(BATCH_BYTES)
            for few in _at_most(batch, BATCH_RUNS)
        )
        lock = threading.Lock()

        def tell(runs: Runs, nbytes: int) -> None:
            with lock:
                arrived(runs, nbytes)

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

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The result of a request without a payload."""
        send_frame(self._connections[0], request)
        result, _ = head_of(self._connections[0])
        return result

    def amaxes(self, shard: int, tensors: Sequence[str]) -> list[float]:
        """As `OpenSource.amaxes`."""
        request = {
            "type": "amax",
            "shard": shard,
            "stamp": self.shards[shard].stamp,
            "tensors": list(tensors),
        }
        return msgspec.convert(self.ask(request)["amax"], list[float])

    def confirm(self) -> None:
        """As `OpenSource.confirm`."""
        for connection in self._connections:
            send_frame(connection, {"type": "confirm"})
            head_of(connection)

    def close(self) -> None:
        """As `OpenSource.close`."""
        for connection in self._connections:
            connection.close()

    def _stream(
        self,
        connection: socket.socket,
        batches: deque["_Batch"],
        target: Bytes,
        arrived: Arrived,
    ) -> None:
        """Take batches until there are none, one asked for while another arrives."""
        asked: deque[_Batch] = deque()
        while True:
            while len(asked) < 2 and batches:
                try:
                    batch = batches.popleft()
                except IndexError:
                    # Another stream took the last one.
                    break
                self._ask(connection, batch)
                asked.append(batch)
            if not asked:
                return
            batch = asked.popleft()
            result, nbytes = head_of(connection)
            if result.get("delta"):
                payload = memoryview(bytearray(nbytes))
                receive_bytes(connection, payload)
                assert batch.delta is not None, "no delta was asked for"
                size = batch.delta.block_bytes
                apply_delta(payload, batch.runs, target, size, verify=batch.verify)
            elif nbytes == batch.runs.nbytes + (DIGEST_BYTES if batch.verify else 0):
                receive_runs(connection, batch.runs, target, Digest(batch.verify))
                nbytes = batch.runs.nbytes
            else:
                raise ConnectionLostError(f"{nbytes} bytes were announced for {batch.runs.nbytes}")
            arrived(batch.runs, nbytes)

    def _ask(self, connection: socket.socket, batch: "_Batch") -> None:
        header: dict[str, Any] = {
            "type": "read",
            "shard": batch.shard,
            "stamp": self.shards[batch.shard].stamp,
            "verify": batch.verify,
        }
        if batch.base is not None and batch.delta is not None:
            header["base"] = batch.base
            header["delta"] = msgspec.to_builtins(batch.delta)
        send_frame(connection, header, encode_runs(batch.runs))


def connect_tcp(address: str, ticket: bytes, timeout_s: float) -> socket.socket:
    """A blocking connection, both ends known to each other. Raises as `RemoteState`."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise InvalidRequestError(f"a remote StateManager is tcp://host:port, not {address!r}")
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    try:
        # From here on a blocking socket, whose waits the kernel bounds.
        connection.settimeout(None)
        set_timeout(connection, timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet_server(connection, ticket)
    except BaseException:
        connection.close()
        raise
    return connection


def _offers(connection: socket.socket, request: dict[str, Any]) -> list[_Offered]:
    send_frame(connection, request)
    answer, _ = head_of(connection)
    return msgspec.convert(answer["shards"], list[_Offered])


def head_of(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """The head of an answer, and the size of the payload that is still to come."""
    header, announced = recv_head(connection, payload_bytes_max=ANSWER_BYTES_MAX)
    if "error" in header:
        raise from_wire(header["error"])
    result: dict[str, Any] = header["result"]
    return result, announced


def _shard(offered: _Offered, layout_of: LayoutOf) -> Shard:
    layout = layout_of(offered.layout) if offered.slices is None else Layout.of(offered.slices)
    if layout is None or layout.digest != offered.layout:
        raise ConnectionLostError("the source answered with a layout that was not asked for")
    return Shard(rank=offered.rank, stamp=offered.stamp, layout=layout, nbytes=offered.nbytes)


def _at_most(runs: Runs, count: int) -> list[Runs]:
    return [runs.chosen(slice(at, at + count)) for at in range(0, len(runs), count)]
