"""Transport to a StateManager on another node, over TCP."""

import socket
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from plexrl.errors import ConnectionLostError, InvalidRequestError, from_wire
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.strided_copies import StridedCopies
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.delta.stream import apply_delta
from plexrl.statemanager.transfer.transport.copy_stream import (
    ANSWER_BYTES_MAX,
    DIGEST_BYTES,
    Digest,
    encode_copies,
    receive_bytes,
    receive_copies,
)
from plexrl.statemanager.transfer.transport.handshake import greet_server
from plexrl.statemanager.transfer.transport.source import Arrived, LayoutOf, Shard, ShardCopies
from plexrl.statemanager.transfer.transport.tcp.sockets import set_timeout
from plexrl.wire.framing import recv_head, send_frame

BYTES_PER_S = 3e9
REQUEST_S = 20e-6
BATCH_BYTES = 32 << 20
"""Size of one request, and so of what is requested again after a connection is lost."""
BATCH_COPIES = 1024
"""Limit of one request: two requests fit the socket buffers, so the ends cannot deadlock."""


class _Offered(msgspec.Struct):
    rank: int
    stamp: str
    nbytes: int
    layout: str
    slices: tuple[StateSlice, ...] | None


class _Batch(NamedTuple):
    """The content of one request. A possible delta is always verified: if the target does not hold
    the base after all, the whole is pulled instead."""

    shard: int
    copies: StridedCopies
    base: str | None
    delta: DeltaPolicy | None

    @property
    def verify(self) -> bool:
        return self.base is not None


class Tcp:
    """Opens sources by `host:port`."""

    def __init__(self, layout_of: LayoutOf, timeout_s: float, ticket: bytes) -> None:
        """`timeout_s` bounds each wait on a socket."""
        self._layout_of = layout_of
        self._timeout_s = timeout_s
        self._ticket = ticket

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> "TcpSource":
        """As `Transport.open`."""
        connection = connect_tcp(address, self._ticket, self._timeout_s)
        try:
            request = {"type": "open", "source": deployment, "seq": seq, "known": list(known)}
            send_frame(connection, request)
            answer, _ = head_of(connection)
            offers = msgspec.convert(answer["shards"], list[_Offered])
            shards = tuple(_shard(offered, self._layout_of) for offered in offers)
            return TcpSource(f"tcp://{address}", connection, shards)
        except BaseException:
            connection.close()
            raise


class TcpSource:
    """An `OpenSource` on another node."""

    def __init__(self, address: str, connection: socket.socket, shards: tuple[Shard, ...]) -> None:
        self.address = address
        self.shards = shards
        self.bytes_per_s = BYTES_PER_S
        self.request_s = REQUEST_S
        # The daemon itself held the version while it sent these bytes.
        self.arrives_whole = True
        self._connection = connection

    def read(
        self,
        parts: tuple[ShardCopies, ...],
        target: Bytes,
        arrived: Arrived,
        delta: DeltaPolicy | None = None,
    ) -> None:
        """As `OpenSource.read`; the next batch is requested while one arrives."""
        waiting = deque(
            _Batch(part.shard, few, None if delta is None else part.base, delta)
            for part in parts
            for batch in part.copies.batches(BATCH_BYTES)
            for few in _at_most(batch, BATCH_COPIES)
        )
        requested: deque[_Batch] = deque()
        while waiting or requested:
            while waiting and len(requested) < 2:
                requested.append(waiting.popleft())
                self._request(requested[-1])
            batch = requested.popleft()
            arrived(batch.copies, self._receive(batch, target))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request without a payload; returns the result."""
        send_frame(self._connection, request)
        result, _ = head_of(self._connection)
        return result

    def confirm(self) -> None:
        """As `OpenSource.confirm`."""
        self.ask({"type": "confirm"})

    def close(self) -> None:
        """As `OpenSource.close`."""
        self._connection.close()

    def _request(self, batch: "_Batch") -> None:
        header: dict[str, Any] = {
            "type": "read",
            "shard": batch.shard,
            "stamp": self.shards[batch.shard].stamp,
            "verify": batch.verify,
        }
        if batch.base is not None and batch.delta is not None:
            header["base"] = batch.base
            header["delta"] = msgspec.to_builtins(batch.delta)
        send_frame(self._connection, header, encode_copies(batch.copies))

    def _receive(self, batch: "_Batch", target: Bytes) -> int:
        """Receive one batch into `target`; returns the bytes that crossed the network."""
        result, nbytes = head_of(self._connection)
        if result.get("delta"):
            payload = memoryview(bytearray(nbytes))
            receive_bytes(self._connection, payload)
            assert batch.delta is not None, "the source sends a delta only on request"
            block_bytes = batch.delta.block_bytes
            apply_delta(payload, batch.copies, target, block_bytes, verify=batch.verify)
            return nbytes
        if nbytes != batch.copies.nbytes + (DIGEST_BYTES if batch.verify else 0):
            raise ConnectionLostError(
                f"the source announced {nbytes} bytes for a request of {batch.copies.nbytes}"
            )
        receive_copies(self._connection, batch.copies, target, Digest(batch.verify))
        return batch.copies.nbytes


def connect_tcp(address: str, ticket: bytes, timeout_s: float) -> socket.socket:
    """A blocking, authenticated connection. Raises as `RemoteState`."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise InvalidRequestError(
            f"the address of a remote StateManager is tcp://host:port, not {address!r}"
        )
    connection = socket.create_connection((host, int(port)), timeout=timeout_s)
    try:
        # The socket is blocking from here on; the kernel applies the timeouts.
        connection.settimeout(None)
        set_timeout(connection, timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greet_server(connection, ticket)
    except BaseException:
        connection.close()
        raise
    return connection


def head_of(connection: socket.socket) -> tuple[dict[str, Any], int]:
    """The head of an answer, and the size of its payload, which is not received yet."""
    header, announced = recv_head(connection, payload_bytes_max=ANSWER_BYTES_MAX)
    if "error" in header:
        raise from_wire(header["error"])
    result: dict[str, Any] = header["result"]
    return result, announced


def _shard(offered: _Offered, layout_of: LayoutOf) -> Shard:
    layout = layout_of(offered.layout) if offered.slices is None else Layout.of(offered.slices)
    if layout is None or layout.digest != offered.layout:
        raise ConnectionLostError("the source sent a layout with another digest")
    return Shard(rank=offered.rank, stamp=offered.stamp, layout=layout, nbytes=offered.nbytes)


def _at_most(copies: StridedCopies, count: int) -> list[StridedCopies]:
    return [copies.chosen(slice(at, at + count)) for at in range(0, len(copies), count)]
