"""Serves ranks' state versions to other nodes, on connections of `tcp.server`.

    open_state  {deployment, seq, rank, digests}  →  {shards: [{manifest, blocks}]}
    read_state  {shard, stamp, verify} + copies   →  the copies' bytes, then their checksum

The connection holds what it opened. With `digests` a shard includes the checksums of its blocks, by
section, and the manifest includes the digest over all of them.
"""

import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import InvalidRequestError, PermissionDeniedError, PlexRLError, StateLostError
from plexrl.statemanager.layout.plan.columns import DTYPES
from plexrl.statemanager.layout.strided_copies import BYTES_CAST, StridedCopies, packed
from plexrl.statemanager.protocol.tickets import Claims, Role
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.lease import Lease
from plexrl.statemanager.store.versions.versions import Manifest, VersionKind
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.reader import LocalReader
from plexrl.statemanager.transfer.transport.copy_stream import (
    ANSWER_BYTES_MAX,
    DIGEST_BYTES,
    Digest,
    HeldData,
    decode_copies,
    send_copies,
)
from plexrl.statemanager.transfer.transport.mapped_files import MappedData
from plexrl.wire.framing import encode_head

READ_BYTES_MAX = 64 << 20
"""Limit of one read from NVMe, which passes through memory."""


class OpenStateFrame(msgspec.Struct, tag="open_state"):
    """Open every rank's version, or one rank's."""

    deployment: str
    seq: int
    rank: int | None = None
    digests: bool = False


class ReadStateFrame(msgspec.Struct, tag="read_state"):
    """Read copies from one of the shards that were opened last."""

    shard: int
    stamp: str
    verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedState:
    """Description of a rank's version for the client."""

    manifest: Manifest
    blocks: tuple[bytes, ...] = ()
    """Checksums of its blocks, by section; empty unless requested."""


class StateReading:
    """Serves one connection's state requests. One thread at a time."""

    def __init__(self, store: Store, claims: Claims, leases: ExitStack) -> None:
        """`leases` closes with the connection."""
        self._store = store
        self._claims = claims
        self._opened = leases.enter_context(ExitStack())
        self._held: list[tuple[Lease, LocalReader]] = []

    def open(self, request: OpenStateFrame) -> dict[str, Any]:
        """Hold versions in place and describe them.

        Raises:
            PermissionDeniedError: the version is of another worker's deployment.
            CorruptStateError: digests are requested, and a version is damaged.
        """
        claims = self._claims
        if claims.role != Role.AGENT and claims.deployment != request.deployment:
            raise PermissionDeniedError(
                f"{claims.holder} may read only the state of its own deployment, not of "
                f"{request.deployment!r}"
            )
        found = self._store.find(
            lambda m: (
                (m.kind, m.deployment, m.seq)
                == (VersionKind.STATE, request.deployment, request.seq)
                and request.rank in (None, m.rank)
            )
        )
        offered: list[OfferedState] = []
        # A connection holds one version at a time; opening another releases the last one.
        self._held = []
        self._opened.close()
        for version in found:
            name, what = version.manifest.name, version.manifest.description
            lease = self._opened.enter_context(self._store.lease(name, what))
            self._held.append((lease, LocalReader(lease)))
            offer = OfferedState(manifest=lease.manifest)
            if request.digests:
                manifest = replace(lease.manifest, digest=lease.digest())
                offer = OfferedState(manifest=manifest, blocks=tuple(lease.block_digests()))
            offered.append(offer)
        return {"shards": [msgspec.to_builtins(one) for one in offered]}

    def read(self, connection: socket.socket, request: ReadStateFrame, payload: bytearray) -> None:
        """Send the bytes of copies from a shard.

        Raises:
            InvalidRequestError: the shard is not open, or the copies exceed its data.
            StateLostError: the version was replaced.
            BegunError: it failed after sending had begun.
        """
        if not 0 <= request.shard < len(self._held):
            raise InvalidRequestError(f"shard {request.shard} is not open: open the version first")
        lease, reader = self._held[request.shard]
        if lease.manifest.stamp != request.stamp:
            raise StateLostError(
                f"{lease.manifest.description} no longer has the stamp {request.stamp!r}: "
                "start over"
            )
        copies = checked_copies(payload, lease.manifest.nbytes)
        head = encode_head({"result": {}}, copies.nbytes + (DIGEST_BYTES if request.verify else 0))
        digest = Digest(request.verify)
        if reader.mapped is None:
            # Data on NVMe may be damaged, which can be reported only before sending begins.
            found = _read(reader, copies)
            digest.add(found)
            connection.sendall(head)
            connection.sendall(found.data)
            connection.sendall(digest.value())
            return
        connection.sendall(head)
        try:
            send_copies(connection, _held_data(lease, reader.mapped), copies, digest)
        except PlexRLError as error:
            raise BegunError(error) from error


class BegunError(Exception):
    """A failure after the payload has begun, when no error can be sent any more."""

    def __init__(self, cause: PlexRLError) -> None:
        super().__init__()
        self.cause = cause


def checked_copies(payload: bytearray, nbytes: int) -> StridedCopies:
    """Decode received copies and check them as `check_within` does."""
    try:
        copies = decode_copies(payload)
    except ValueError as error:
        raise InvalidRequestError(f"malformed copies: {error}") from error
    check_within(copies, nbytes)
    return copies


def check_within(copies: StridedCopies, nbytes: int) -> None:
    """Check that copies lie within `nbytes` bytes and fit one answer.

    Raises:
        InvalidRequestError: they do not.
    """
    casts = (copies.casts == BYTES_CAST) | ((copies.casts >= 0) & (copies.casts < len(DTYPES) ** 2))
    limits = np.int64(1) << np.int64(48)
    small = (
        (copies.items >= 1)
        & (copies.counts >= 1)
        & (copies.src_strides >= 0)
        & (copies.src_offsets >= 0)
    )
    small &= (copies.items <= nbytes) & (
        copies.counts <= limits // np.maximum(1, copies.src_strides)
    )
    if not (casts & small).all():
        raise InvalidRequestError("copies need positive sizes and known dtypes")
    # In floating point, so that no product can overflow to a small number.
    total = (copies.row_bytes().astype(np.float64) * copies.counts).sum()
    if (copies.src_offsets > nbytes).any() or total > ANSWER_BYTES_MAX:
        raise InvalidRequestError(
            f"copies must begin within the {nbytes} bytes of the data, and together have at most "
            f"{ANSWER_BYTES_MAX} bytes"
        )
    ends = (
        copies.src_offsets + (copies.counts - 1) * copies.src_strides + copies.row_bytes_at_source()
    )
    if not (ends <= nbytes).all():
        raise InvalidRequestError(f"copies end beyond the {nbytes} bytes of the data")


def _read(reader: LocalReader, copies: StridedCopies) -> Bytes:
    if copies.nbytes > READ_BYTES_MAX:
        raise InvalidRequestError(
            f"a request reads {copies.nbytes} bytes from NVMe; the limit is {READ_BYTES_MAX}: "
            "read less at once"
        )
    found: Bytes = np.empty(copies.nbytes, dtype=np.uint8)
    reader.read(packed(copies), found)
    return found


def _held_data(lease: Lease, mapped: MappedData) -> HeldData:
    return HeldData(regions=lease.regions, map_all=lambda: mapped)
