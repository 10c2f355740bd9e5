"""TCP server for other nodes: one blocking thread per connection, zero-copy where possible.

After the handshake a client sends frames; each is answered by one frame:

    open     {source, seq, known}  →  {shards}            held until the connection closes
    read     {shard, stamp, verify, base, delta} + copies  →  the copies' bytes as the payload, then
             their checksum; or, with {delta}, their changes since the base
    lend     {}                    →  {agent, shards}     addresses for NIXL
    confirm  {}                    →  {}                  the version was held until now

These requests are for published versions; `tcp.state_server` has those for the ranks' own state.

The answer to a failed request is `{error}`. A failure after a payload has begun ends the
connection.
"""

import logging
import socket
import threading
from contextlib import ExitStack, suppress
from typing import Any

import msgspec

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    OverloadedError,
    PlexRLError,
    StateLostError,
)
from plexrl.statemanager.daemon.handlers.caller import OPENED_MAX, Services
from plexrl.statemanager.protocol.tickets import Claims
from plexrl.statemanager.store.versions.published import (
    LeasedShard,
    lease_by_stamp,
    lease_published,
)
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.delta.stream import encode_delta
from plexrl.statemanager.transfer.transport.copy_stream import (
    DIGEST_BYTES,
    Digest,
    HeldData,
    send_copies,
)
from plexrl.statemanager.transfer.transport.handshake import greet_client
from plexrl.statemanager.transfer.transport.mapped_files import MappedData, MappedFiles
from plexrl.statemanager.transfer.transport.nixl import NixlLender
from plexrl.statemanager.transfer.transport.tcp.sockets import set_timeout
from plexrl.statemanager.transfer.transport.tcp.state_server import (
    BegunError,
    OpenStateFrame,
    ReadStateFrame,
    StateReading,
    checked_copies,
)
from plexrl.wire.framing import encode_head, recv_frame, send_frame

LOG = logging.getLogger(__name__)

TIMEOUT_S = 60
"""Timeout of a client in the middle of a message."""
HANDSHAKE_TIMEOUT_S = 5
REQUEST_BYTES_MAX = 16 << 20
ACCEPT_AGAIN_S = 0.1
"""Delay before the next accept after one failed, for example for lack of descriptors."""
BASES_MAX = 64
"""Maximum bases of one connection: a pull uses one for each shard."""


class _Open(msgspec.Struct, tag="open"):
    source: str
    seq: int
    known: tuple[str, ...] = ()


class _Read(msgspec.Struct, tag="read"):
    shard: int
    stamp: str
    verify: bool = False
    base: str | None = None
    delta: DeltaPolicy | None = None


class _Confirm(msgspec.Struct, tag="confirm"):
    pass


class _Lend(msgspec.Struct, tag="lend"):
    pass


class TcpServer:
    """Serves from construction until `close`."""

    def __init__(
        self,
        services: Services,
        listen: str,
        lender: NixlLender | None = None,
    ) -> None:
        """`listen` is `host:port`. A `lender` enables RDMA reads.

        Raises:
            InvalidRequestError: `listen` is malformed.
        """
        self._services = services
        self._connections_max = services.config.connections_max
        self._lender = lender
        self._lock = threading.Lock()
        self._served: set[socket.socket] = set()
        self._closing = threading.Event()
        host, _, port = listen.rpartition(":")
        if not port.isdecimal():
            raise InvalidRequestError(f"serve_tcp is host:port, not {listen!r}")
        self._socket = socket.create_server((host, int(port)), backlog=128)
        self.address = "{}:{}".format(*self._socket.getsockname()[:2])
        """Listening address, with the port that the system chose."""
        threading.Thread(target=self._accept, name="plexrl-tcp", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and end every connection; readers go to another source."""
        self._closing.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            served = list(self._served)
        for connection in served:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError as error:
                # Either `close` shut the socket down, or the failure is temporary.
                if self._closing.wait(ACCEPT_AGAIN_S):
                    return
                LOG.warning("no remote reader can be accepted: %s", error)
                continue
            with self._lock:
                is_full = len(self._served) >= self._connections_max
                if not is_full:
                    self._served.add(connection)
            if is_full:
                LOG.warning("%s was refused: %d connections", peer, self._connections_max)
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError as error:
                LOG.warning("%s was refused: %s", peer, error)
                with self._lock:
                    self._served.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            set_timeout(connection, HANDSHAKE_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            claims = greet_client(connection, self._services.key)
            # A client may hold a version without limit while it is alive.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            set_timeout(connection, 0, sending_s=TIMEOUT_S)
            with ExitStack() as leases:
                reader = _Reader(self._services, claims, leases, self._lender)
                while True:
                    reader.answer(connection)
        except ConnectionLostError:
            LOG.debug("a remote reader left")
        except (OSError, PlexRLError) as error:
            LOG.warning("a remote reader was cut off: %s", error)
        finally:
            with self._lock:
                self._served.discard(connection)
            connection.close()


class _Reader:
    """Serves one connection's requests, one after the other."""

    def __init__(
        self, services: Services, claims: Claims, leases: ExitStack, lender: NixlLender | None
    ) -> None:
        self._store = services.store
        self._claims = claims
        self._opened = 0
        self._lender = lender
        self._leases = leases
        self._held: list[tuple[LeasedShard, HeldData]] = []
        self._bases: dict[str, MappedData | None] = {}
        self._states = StateReading(self._store, claims, leases)

    def answer(self, connection: socket.socket) -> None:
        header, payload = recv_frame(connection, payload_bytes_max=REQUEST_BYTES_MAX)
        try:
            request = msgspec.convert(
                header, _Open | _Read | _Lend | _Confirm | OpenStateFrame | ReadStateFrame
            )
            match request:
                case OpenStateFrame():
                    send_frame(connection, {"result": self._states.open(request)})
                case ReadStateFrame():
                    self._states.read(connection, request, payload)
                case _Open():
                    send_frame(connection, {"result": self._open(request)})
                case _Confirm():
                    send_frame(connection, {"result": {}})
                case _Lend():
                    send_frame(connection, {"result": self._lend()})
                case _Read():
                    self._read(connection, request, payload)
        except msgspec.ValidationError as error:
            refused = InvalidRequestError(f"malformed request: {error}")
            send_frame(connection, {"error": refused.to_wire()})
        except BegunError as begun:
            raise begun.cause from begun
        except (ConnectionLostError, OSError):
            raise
        except PlexRLError as error:
            send_frame(connection, {"error": error.to_wire()})

    def _open(self, request: _Open) -> dict[str, Any]:
        self._claims.check_may_pull(request.source)
        if self._opened >= OPENED_MAX:
            raise OverloadedError(
                f"{self._opened} versions are open on this connection: close it and open another",
                retry_after_s=0.0,
            )
        self._opened += 1
        for shard in lease_published(self._store, self._leases, request):
            self._held.append((shard, _held_data(shard)))
        return {
            "shards": [
                msgspec.to_builtins(shard.description(request.known)) for shard, _ in self._held
            ]
        }

    def _lend(self) -> dict[str, Any]:
        if self._lender is None:
            raise InvalidRequestError(
                "this StateManager does not serve RDMA: use its tcp:// address"
            )
        lent, registered = self._lender.lend([data.map_all() for _, data in self._held])
        self._leases.callback(self._lender.take_back, registered)
        return {"agent": lent.agent, "shards": lent.shards}

    def _read(self, connection: socket.socket, request: _Read, payload: bytearray) -> None:
        shard, data = self._shard(request)
        copies = checked_copies(payload, shard.manifest.nbytes)
        if request.base is not None and request.delta is not None:
            base = self._base(shard, request.base)
            if base is not None:
                new, verify = data.map_all(), request.verify
                parts = encode_delta(base, new, copies, request.delta, verify=verify)
                if parts is not None:
                    send_frame(connection, {"result": {"delta": True}}, b"".join(parts))
                    return
        trailer = DIGEST_BYTES if request.verify else 0
        connection.sendall(encode_head({"result": {}}, copies.nbytes + trailer))
        try:
            send_copies(connection, data, copies, Digest(request.verify))
        except PlexRLError as error:
            raise BegunError(error) from error

    def _shard(self, request: _Read) -> tuple[LeasedShard, HeldData]:
        if not 0 <= request.shard < len(self._held):
            raise InvalidRequestError(f"shard {request.shard} is not open: open the version first")
        shard, data = self._held[request.shard]
        if shard.manifest.stamp != request.stamp:
            raise StateLostError(
                f"{shard.manifest.description} no longer has the stamp {request.stamp!r}: "
                "pull again"
            )
        return shard, data

    def _base(self, shard: LeasedShard, stamp: str) -> MappedData | None:
        """The data of an earlier version of the shard, if it is kept and has the same layout."""
        if stamp not in self._bases:
            if len(self._bases) >= BASES_MAX + len(self._held):
                raise InvalidRequestError("the connection uses too many bases: pull again")
            earlier = lease_by_stamp(self._store, self._leases, shard.manifest.shard, stamp)
            alike = earlier is not None and earlier.layout.digest == shard.layout.digest
            self._bases[stamp] = _held_data(earlier).map_all() if earlier and alike else None
        return self._bases[stamp]


def _held_data(shard: LeasedShard) -> HeldData:
    mapped: list[MappedData] = []

    def map_all() -> MappedData:
        if not mapped:
            mapped.append(MappedData.of(shard.regions, MappedFiles().of(shard.regions)))
        return mapped[0]

    return HeldData(regions=shard.regions, map_all=map_all)
