"""Versions of ranks' state for other nodes, on connections of `transport.tcp_server`.

    open_state  {deployment, seq, rank, digests}  →  {shards: [{manifest, blocks}]}
    read_state  {shard, stamp, verify} + copies     →  the copies' bytes, then their digest

What is opened is held for the connection. With `digests` a shard comes with those of its blocks,
by section, and the manifest with the digest over all of them.
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
"""Of what lies on NVMe, at once: it goes through memory."""


class OpenStateFrame(msgspec.Struct, tag="open_state"):
    """Every rank's version, or one's."""

    deployment: str
    seq: int
    rank: int | None = None
    digests: bool = False


class ReadStateFrame(msgspec.Struct, tag="read_state"):
    """StridedCopies of one of the shards that were opened last."""

    shard: int
    stamp: str
    verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedState:
    """A rank's version, as it is offered."""

    manifest: Manifest
    blocks: tuple[bytes, ...] = ()
    """The digests of its blocks, by section; empty unless they were asked for."""


class StateReading:
    """One connection's requests for state. One thread at a time."""

    def __init__(self, store: Store, claims: Claims, leases: ExitStack) -> None:
        """`leases` is open for as long as the connection is."""
        self._store = store
        self._claims = claims
        self._opened = leases.enter_context(ExitStack())
        self._held: list[tuple[Lease, LocalReader]] = []

    def open(self, request: OpenStateFrame) -> dict[str, Any]:
        """Hold versions in place and describe them.

        Raises:
            PermissionDeniedError: a worker may read its own deployment's only.
            CorruptStateError: digests are asked for, and a version is damaged.
        """
        claims = self._claims
        if claims.role != Role.AGENT and claims.deployment != request.deployment:
            raise PermissionDeniedError(
                f"{claims.holder} may read the state of its own deployment, not of "
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
        # One version after the other is opened on a connection; those of before are let go.
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
        """Send copies of a shard.

        Raises:
            InvalidRequestError: there is no such shard, or the copies are not of its data.
            StateLostError: the version was replaced.
            BegunError: sending had begun when it failed.
        """
        if not 0 <= request.shard < len(self._held):
            raise InvalidRequestError(f"there is no shard {request.shard}: open the version first")
        lease, reader = self._held[request.shard]
        if lease.manifest.stamp != request.stamp:
            raise StateLostError(
                f"{lease.manifest.description} is not of the stamp {request.stamp!r} any more: "
                "begin again"
            )
        copies = checked_copies(payload, lease.manifest.nbytes)
        head = encode_head({"result": {}}, copies.nbytes + (DIGEST_BYTES if request.verify else 0))
        digest = Digest(request.verify)
        if reader.mapped is None:
            # What lies on NVMe may be damaged, which can be said before anything is sent only.
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
    """Something failed when it was too late to say so."""

    def __init__(self, cause: PlexRLError) -> None:
        super().__init__()
        self.cause = cause


def checked_copies(payload: bytearray, nbytes: int) -> StridedCopies:
    """StridedCopies off the wire that lie within `nbytes` bytes. Raises InvalidRequestError: they do not."""
    try:
        copies = decode_copies(payload)
    except ValueError as error:
        raise InvalidRequestError(f"malformed copies: {error}") from error
    check_within(copies, nbytes)
    return copies


def check_within(copies: StridedCopies, nbytes: int) -> None:
    """Refuse copies that lie not wholly within `nbytes` bytes, or are more than one answer holds.

    Raises:
        InvalidRequestError: some do not.
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
        raise InvalidRequestError("copies have positive sizes, and known dtypes")
    # In floating point, where no product can wrap around to something small.
    total = (copies.row_bytes().astype(np.float64) * copies.counts).sum()
    if (copies.src_offsets > nbytes).any() or total > ANSWER_BYTES_MAX:
        raise InvalidRequestError(
            f"copies begin within the {nbytes} bytes of the data, and come to at most "
            f"{ANSWER_BYTES_MAX} bytes together"
        )
    ends = (
        copies.src_offsets + (copies.counts - 1) * copies.src_strides + copies.row_bytes_at_source()
    )
    if not (ends <= nbytes).all():
        raise InvalidRequestError(f"copies end beyond the {nbytes} bytes of the data")


def _read(reader: LocalReader, copies: StridedCopies) -> Bytes:
    if copies.nbytes > READ_BYTES_MAX:
        raise InvalidRequestError(
            f"copies of {copies.nbytes} bytes were asked for at once; {READ_BYTES_MAX} is the most of "
            "what lies on NVMe"
        )
    found: Bytes = np.empty(copies.nbytes, dtype=np.uint8)
    reader.read(packed(copies), found)
    return found


def _held_data(lease: Lease, mapped: MappedData) -> HeldData:
    return HeldData(regions=lease.regions, map_all=lambda: mapped)
