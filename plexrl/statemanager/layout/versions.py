"""Versions of a shard: one rank's state after a given operation, and the header file format.

A version is a manifest, and one object per section of its data. A version is stored once its header
is written under a temporary name and renamed:

    magic | u64 bytes of JSON | u64 xxh3 of JSON | record as JSON | zeros up to a page
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

import msgspec
import xxhash

from plexrl.errors import CorruptStateError
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.layout.ranges import PAGE_BYTES, Piece

MAGIC = b"PLEXRLS2"

NO_DIGEST = "0" * 32

_HEAD = struct.Struct("<8sQQ")
_NAME_LENGTH_MAX = 96


class VersionKind(StrEnum):
    """Purpose of a version."""

    STATE = "state"
    """State that the saving rank loads again."""
    PUBLISHED = "published"
    """Parameters that other deployments pull; immutable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A contiguous run of bytes, both in the arena and in the version's data."""

    arena_offset: int
    file_offset: int
    """Offset from the start of the data."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A range of a version's data that is stored as one object."""

    start: int
    """Offset in the data, a multiple of the page size."""
    nbytes: int
    share_key: str = ""
    """Ranks with a section of the same key hold replicas of the same slices in the same layout;
    empty: no other rank holds them."""
    device_digest: str = ""
    """Digest of the bytes, which the rank computed on its device; empty: none. Sections of one
    share key are equal if these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Metadata of one version of one shard."""

    deployment: str
    rank: int
    world_size: int
    seq: int
    kind: VersionKind
    parts: tuple[StatePart, ...]
    meta_json: str
    slices: tuple[StateSlice, ...]
    """Slices with their offsets in the saved arena."""
    extents: tuple[Extent, ...]
    """In the order of the data; bytes between extents are zero."""
    nbytes: int
    """Size of the data."""
    ordinal: int = 0
    """Sequence number of the save on this node; of two versions of one name the higher is
    current."""
    stamp: str = ""
    """ETag of these bytes: an arena with this stamp equals the version."""
    digest: str = NO_DIGEST
    """Hex xxh3-128 of the digests of all blocks of all sections; `NO_DIGEST` for a version that was
    saved on this node and not sent to another."""
    sections: tuple[Section, ...] = ()
    """In the order of the data."""
    tenant: str = ""
    """Tenant whose quota the bytes count against."""
    token: int = 0
    """Fencing token of the group lock during the save; equal for all ranks of one save."""

    @property
    def shard(self) -> tuple[str, int]:
        """Deployment and rank."""
        return (self.deployment, self.rank)

    @property
    def name(self) -> str:
        """Name in the store; equal for all attempts to store this version."""
        return version_name(self.deployment, self.rank, self.world_size, self.kind, self.seq)

    @property
    def file_name(self) -> str:
        """File name of this attempt; the deployment is truncated."""
        deployment = quote(self.deployment, safe="")[:_NAME_LENGTH_MAX]
        return f"{deployment}.{self.rank}.{self.kind}.{self.seq}.{self.ordinal}"

    @property
    def description(self) -> str:
        """For messages."""
        what = "published version" if self.kind == VersionKind.PUBLISHED else "version"
        return f"{what} {self.seq} of {self.deployment!r} rank {self.rank}"


def version_name(deployment: str, rank: int, world_size: int, kind: VersionKind, seq: int) -> str:
    """Name of a version in the store.

    The name contains the number of ranks: a rank that saves under a new layout must not replace a
    version from which other ranks may still have to load.
    """
    return f"{deployment}.{rank}of{world_size}.{kind}.{seq}"


class ObjectRecord(msgspec.Struct, frozen=True, array_like=True):
    """An object in a version's header."""

    id: str
    nbytes: int
    pieces: tuple[Piece, ...] = ()
    """Location in the host tier's segments; empty in an NVMe header."""


class VersionRecord(msgspec.Struct, frozen=True):
    """Contents of a header."""

    manifest: Manifest
    objects: tuple[ObjectRecord, ...]
    """One per section."""


def padded(nbytes: int, alignment: int = PAGE_BYTES) -> int:
    """`nbytes`, rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def encode_page(magic: bytes, text: bytes) -> bytes:
    """Magic, length, checksum and `text`, padded to whole pages."""
    head = _HEAD.pack(magic, len(text), xxhash.xxh3_64_intdigest(text)) + text
    return head.ljust(padded(len(head)), b"\0")


def decode_page(magic: bytes, start: bytes) -> bytes:
    """The `text` of `encode_page`.

    Raises:
        CorruptStateError: the page is damaged.
    """
    try:
        found, length, checksum = _HEAD.unpack_from(start)
    except struct.error as error:
        raise CorruptStateError(f"the header is damaged ({error}): restore a checkpoint") from error
    text = start[_HEAD.size : _HEAD.size + length]
    if found != magic or len(text) < length or xxhash.xxh3_64_intdigest(text) != checksum:
        raise CorruptStateError("the header is damaged: restore a checkpoint")
    return text


def header_bytes(manifest_bytes: int, objects: Sequence[ObjectRecord]) -> int:
    """Size of a header whose manifest takes `manifest_bytes` as JSON."""
    around = len('{"manifest":,"objects":}')
    return padded(_HEAD.size + around + manifest_bytes + len(msgspec.json.encode(objects)))


def digest_of(digests: Iterable[bytes]) -> str:
    """A version's digest, from the digests of its blocks."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def encode_header(record: VersionRecord) -> bytes:
    """Contents of a version's header file."""
    return encode_page(MAGIC, msgspec.json.encode(record))


def decode_header(contents: bytes) -> VersionRecord:
    """Decode a header file.

    Raises:
        CorruptStateError: the header is damaged.
    """
    try:
        return msgspec.json.decode(decode_page(MAGIC, contents), type=VersionRecord)
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"the header is damaged ({error}): restore a checkpoint") from error
