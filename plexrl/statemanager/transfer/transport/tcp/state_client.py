"""Client of another node's state versions, over TCP (`tcp.state_server`)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from plexrl.errors import ConnectionLostError
from plexrl.statemanager.layout.strided_copies import StridedCopies, one_range
from plexrl.statemanager.store.versions.versions import Manifest
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.transport.copy_stream import (
    DIGEST_BYTES,
    Digest,
    encode_copies,
    receive_copies,
)
from plexrl.statemanager.transfer.transport.tcp.client import (
    BATCH_BYTES,
    BATCH_COPIES,
    connect_tcp,
    head_of,
)
from plexrl.wire.framing import send_frame

if TYPE_CHECKING:
    import socket


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteShard:
    """One rank's version on another node."""

    index: int
    """Index among the shards that were opened together."""
    manifest: Manifest
    blocks: tuple[bytes, ...]
    """Checksums of its blocks, by section, if requested."""


class _Offered(msgspec.Struct):
    manifest: Manifest
    blocks: tuple[bytes, ...]


class RemoteState:
    """One connection. Not thread-safe."""

    def __init__(self, address: str, ticket: bytes, timeout_s: float) -> None:
        """`address` is `host:port`. `timeout_s` bounds each wait.

        Raises:
            OSError: nothing listens there.
            AuthenticationError: the server has another key than the ticket's.
        """
        self._connection: socket.socket = connect_tcp(address, ticket, timeout_s)

    def open(
        self, deployment: str, seq: int, *, rank: int | None = None, digests: bool = False
    ) -> list[RemoteShard]:
        """Open the shards of a version; they are held until the next `open` or `close`.

        Raises:
            PermissionDeniedError: the ticket is of another deployment's worker.
            ConnectionLostError: the server closed.
        """
        request = {"type": "open_state", "deployment": deployment, "seq": seq, "digests": digests}
        if rank is not None:
            request["rank"] = rank
        send_frame(self._connection, request)
        answer, _ = head_of(self._connection)
        offered = msgspec.convert(answer["shards"], list[_Offered])
        return [
            RemoteShard(index=index, manifest=one.manifest, blocks=one.blocks)
            for index, one in enumerate(offered)
        ]

    def read(
        self, shard: RemoteShard, copies: StridedCopies, target: Bytes, *, verify: bool
    ) -> None:
        """Perform copies into `target`; `verify` checks the sender's checksum of them.

        Raises:
            ConnectionLostError: the server closed; some copies may be done.
            CorruptStateError: the checksum does not match.
        """
        for batch in copies.batches(BATCH_BYTES):
            for at in range(0, len(batch), BATCH_COPIES):
                self._read(shard, batch.chosen(slice(at, at + BATCH_COPIES)), target, verify)

    def read_range(self, shard: RemoteShard, start: int, target: Bytes) -> None:
        """Fill `target` with the data from offset `start` on, unverified. Raises as `read`."""
        self._read(shard, one_range(start, len(target)), target, verify=False)

    def close(self) -> None:
        """Close the connection, which releases the shards."""
        self._connection.close()

    def _read(self, shard: RemoteShard, copies: StridedCopies, target: Bytes, verify: bool) -> None:
        header = {
            "type": "read_state",
            "shard": shard.index,
            "stamp": shard.manifest.stamp,
            "verify": verify,
        }
        send_frame(self._connection, header, encode_copies(copies))
        _, announced = head_of(self._connection)
        if announced != copies.nbytes + (DIGEST_BYTES if verify else 0):
            raise ConnectionLostError(
                f"the source announced {announced} bytes for a request of {copies.nbytes}"
            )
        receive_copies(self._connection, copies, target, Digest(verify))
