"""Transport to a StateManager on another node, over TLS or TCP."""

import socket
import threading
from collections import deque
from collections.abc import Collection
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import msgspec

from plexrl.errors import ConnectionLostError, from_wire
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.plan.columns import Bytes, Layout
from plexrl.statemanager.layout.strided.copies import StridedCopies
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.store.receiving.reader import (
    Arrived,
    Delta,
    LayoutOf,
    offered_layout,
    while_there,
)
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
from plexrl.statemanager.transfer.transport.tcp.sockets import bound_waits
from plexrl.wire.framing import recv_head, send_frame

BYTES_PER_S = 3e9
REQUEST_S = 20e-6
BATCH_BYTES = 32 << 20
"""Size of one request, and so of what is requested again after a connection is lost."""
DELTA_BATCH_BYTES = 4 << 20
"""The same for a delta: the source compares one batch while the target applies the one before."""
BATCH_COPIES = 1024
"""Limit of one request: two requests fit the socket buffers, so the ends cannot deadlock."""


class _Offered(msgspec.Struct):
    rank: int
    stamp: str
    layout: str
    slices: tuple[StateSlice, ...] | None


class Opened(NamedTuple):
    """A version that a connection holds."""

    request: str
    """Type of the requests that read it."""
    number: int
    """Index among the versions that were opened together."""
    stamp: str


class TcpConnection:
    """Blocking and authenticated; holds the versions that were opened over it. Thread-safe."""

    def __init__(self, network: Network, address: str, ticket: bytes, timeout_s: float) -> None:
        """`address` is `tls://…` or `tcp://…`. `timeout_s` bounds each wait.

        Raises:
            OSError: nothing listens there.
            AuthenticationError: another node answers, refuses this one, or has another key than the
                ticket's.
            InvalidRequestError: this process may not use such an address.
        """
        self.address = address
        self._lock = threading.Lock()
        self._socket = network.connect(address, timeout_s)
        try:
            bound_waits(self._socket, timeout_s)
            greet_server(self._socket, ticket)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request without a payload; returns the result."""
        with self._lock:
            send_frame(self._socket, request)
            result, _ = self._head()
            return result

    def read(
        self,
        version: Opened,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        *,
        verify: bool = False,
        delta: Delta | None = None,
    ) -> None:
        """Perform copies; the next batch is requested while one arrives.

        A possible delta is always verified: if the target does not hold the base after all, the
        whole is pulled instead.

        Raises:
            ConnectionLostError: the server closed; some copies may be done.
            CorruptStateError: with `verify`, the sender's checksum does not match.
        """
        verify = verify or delta is not None
        waiting = deque(
            batch.chosen(slice(at, at + BATCH_COPIES))
            for batch in copies.batches(BATCH_BYTES if delta is None else DELTA_BATCH_BYTES)
            for at in range(0, len(batch), BATCH_COPIES)
        )
        requested: deque[StridedCopies] = deque()
        header: dict[str, Any] = {
            "type": version.request,
            "shard": version.number,
            "stamp": version.stamp,
            "verify": verify,
        }
        if delta is not None:
            header |= {"base": delta.base, "delta": msgspec.to_builtins(delta.policy)}
        with self._lock:
            try:
                while waiting or requested:
                    while waiting and len(requested) < 2:
                        requested.append(waiting.popleft())
                        send_frame(self._socket, header, encode_copies(requested[-1]))
                    nbytes = self._receive(requested[0], target, verify=verify, delta=delta)
                    done = requested.popleft()
                    if arrived is not None:
                        arrived(done, nbytes)
            except BaseException:
                if len(requested) > 1:
                    # The answer to the other request would be taken for that to a later one.
                    self._socket.close()
                raise

    def cut(self) -> None:
        """End the connection while another thread waits for an answer, which raises there."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection, which releases the versions."""
        self._socket.close()

    def _receive(
        self, copies: StridedCopies, target: Bytes, *, verify: bool, delta: Delta | None
    ) -> int:
        """Receive one batch into `target`; returns the bytes that crossed the network."""
        result, nbytes = self._head()
        if result.get("delta"):
            payload = memoryview(bytearray(nbytes))
            receive_bytes(self._socket, payload)
            assert delta is not None, "the source sends a delta only on request"
            apply_delta(payload, copies, target, delta.policy.block_bytes, verify=verify)
            return nbytes
        if nbytes != copies.nbytes + (DIGEST_BYTES if verify else 0):
            raise ConnectionLostError(
                f"the source announced {nbytes} bytes for a request of {copies.nbytes}"
            )
        receive_copies(self._socket, copies, target, Digest(verify))
        return copies.nbytes

    def _head(self) -> tuple[dict[str, Any], int]:
        """The head of an answer, and the size of its payload, which is not received yet."""
        header, announced = recv_head(self._socket, payload_bytes_max=ANSWER_BYTES_MAX)
        if "error" in header:
            raise from_wire(header["error"])
        result: dict[str, Any] = header["result"]
        return result, announced


class Tcp:
    """Opens published versions by remote addresses."""

    def __init__(
        self, network: Network, layout_of: LayoutOf, timeout_s: float, ticket: bytes
    ) -> None:
        """`timeout_s` bounds each wait on a socket."""
        self._network = network
        self._layout_of = layout_of
        self._timeout_s = timeout_s
        self._ticket = ticket

    def open(
        self, held: ExitStack, address: str, deployment: str, seq: int, known: Collection[str]
    ) -> "list[TcpReader]":
        """As `Transport.open`."""
        connection = TcpConnection(self._network, address, self._ticket, self._timeout_s)
        held.callback(connection.close)
        request = {"type": "open", "source": deployment, "seq": seq, "known": list(known)}
        offered = msgspec.convert(connection.ask(request)["shards"], list[_Offered])
        return [
            TcpReader(
                connection,
                Opened("read", index, one.stamp),
                rank=one.rank,
                layout=offered_layout(one.layout, one.slices, self._layout_of),
            )
            for index, one in enumerate(offered)
        ]


class TcpReader:
    """A `VersionReader` of a published version on another node."""

    bytes_per_s = BYTES_PER_S
    request_s = REQUEST_S
    # The daemon itself held the version while it sent these bytes.
    arrives_whole = True

    def __init__(
        self, connection: TcpConnection, opened: Opened, *, rank: int, layout: Layout
    ) -> None:
        """The caller owns the connection."""
        self.address = connection.address
        self.rank = rank
        self.stamp = opened.stamp
        self.layout = layout
        self.connection = connection
        self._opened = opened

    def read(
        self,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,
    ) -> None:
        """As `VersionReader.read`."""
        with while_there(self.address):
            self.connection.read(self._opened, copies, target, arrived, delta=delta)

    def confirm(self) -> None:
        """As `VersionReader.confirm`."""
        with while_there(self.address):
            self.connection.ask({"type": "confirm"})
