"""Versions of ranks' state on another node, over TCP (`transport.state_server`)."""

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
    """Among those that were opened together."""
    manifest: Manifest
    blocks: tuple[bytes, ...]
    """The digests of its blocks, by section, where they were asked for."""


class _Offered(msgspec.Struct):
    manifest: Manifest
    blocks: tuple[bytes, ...]


class RemoteState:
    """One connection. Not for use by several threads at once."""

    def __init__(self, address: str, ticket: bytes, timeout_s: float) -> None:
        """`address` is `host:port`. `timeout_s` bounds each wait.

        Raises:
            OSError: nobody is there.
            AuthenticationError: it has another key than the ticket's.
        """
        self._connection: socket.socket = connect_tcp(address, ticket, timeout_s)

    def open(
        self, deployment: str, seq: int, *, rank: int | None = None, digests: bool = False
    ) -> list[RemoteShard]:
        """What is there of a version, held until the next `open` or `close`.

        Raises:
            PermissionDeniedError: the ticket is of another deployment's worker.
            ConnectionLostError: the other end went.
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
        """Bring copies to their places in `target`; `verify`: against the sender's digest of them.

        Raises:
            ConnectionLostError: the other end went; some may have arrived.
            CorruptStateError: bytes were changed on the way.
        """
        for batch in copies.batches(BATCH_BYTES):
            for at in range(0, len(batch), BATCH_COPIES):
                self._read(shard, batch.chosen(slice(at, at + BATCH_COPIES)), target, verify)

    def read_range(self, shard: RemoteShard, start: int, target: Bytes) -> None:
        """Fill `target` with the data from `start` on. Raises as `read`; nothing is verified."""
        self._read(shard, one_range(start, len(target)), target, verify=False)

    def close(self) -> None:
        """Let go of what was opened."""
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
            raise ConnectionLostError(f"{announced} bytes were announced for {copies.nbytes}")
        receive_copies(self._connection, copies, target, Digest(verify))
