"""Versions of a shard: what one rank's state was after a given operation, and its header file.

A version is a manifest, and an object for each section of its data. Its header, written under
another name and renamed when it is whole, is what makes it stored:

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
from plexrl.statemanager.host.free_ranges import Piece
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES

MAGIC = b"PLEXRLS2"

NO_DIGEST = "0" * 32

_HEAD = struct.Struct("<8sQQ")
_NAME_LENGTH_MAX = 96


class VersionKind(StrEnum):
    """What a version is for."""

    STATE = "state"
    """To be loaded by the rank that it was taken from."""
    PUBLISHED = "published"
    """Parameters for other deployments to pull; never changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of bytes that lies in one piece both in the arena and in the version's data."""

    arena_offset: int
    file_offset: int
    """From the start of the data."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A stretch of a version's data that is stored as one object."""

    start: int
    """In the data, on a page boundary."""
    nbytes: int
    share_key: str = ""
    """Ranks whose version has a section of this key hold replicas of these slices, laid out alike;
    empty for what no other rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One complete version of one shard."""

    deployment: str
    rank: int
    world_size: int
    seq: int
    kind: VersionKind
    parts: tuple[StatePart, ...]
    meta_json: str
    slices: tuple[StateSlice, ...]
    """As in the arena they were taken from."""
    extents: tuple[Extent, ...]
    """In the order of the data; what lies between them is zero."""
    nbytes: int
    """Of the data."""
    ordinal: int = 0
    """Counts the versions that this node ever stored: of two of the same name the higher counts."""
    stamp: str = ""
    """Unique to these bytes: says that an arena which held them still does."""
    digest: str = NO_DIGEST
    """Hex xxh3-128 of the digests of all blocks of all sections; `NO_DIGEST` for what was saved on
    this node and never had to prove itself elsewhere."""
    sections: tuple[Section, ...] = ()
    """In the order of the data."""
    tenant: str = ""
    """On whose account the bytes go."""
    token: int = 0
    """Of the group lock that admitted the save: equal for all ranks of one save."""

    @property
    def shard(self) -> tuple[str, int]:
        """Deployment and rank."""
        return (self.deployment, self.rank)

    @property
    def name(self) -> str:
        """The same for every attempt at storing this version."""
        return version_name(self.deployment, self.rank, self.world_size, self.kind, self.seq)

    @property
    def file_name(self) -> str:
        """Of this attempt; readable as far as a file name may be long."""
        deployment = quote(self.deployment, safe="")[:_NAME_LENGTH_MAX]
        return f"{deployment}.{self.rank}.{self.kind}.{self.seq}.{self.ordinal}"

    @property
    def description(self) -> str:
        """For messages."""
        what = "published version" if self.kind == VersionKind.PUBLISHED else "version"
        return f"{what} {self.seq} of {self.deployment!r} rank {self.rank}"


def version_name(deployment: str, rank: int, world_size: int, kind: VersionKind, seq: int) -> str:
    """What the store knows a version by.

    A rank that has been loaded under another layout and saved again replaces nothing that the other
    ranks may still have to be loaded from, so the number of ranks is part of it.
    """
    return f"{deployment}.{rank}of{world_size}.{kind}.{seq}"


class ObjectRecord(msgspec.Struct, frozen=True, array_like=True):
    """An object as a version's header names it."""

    id: str
    nbytes: int
    pieces: tuple[Piece, ...] = ()
    """Where in the host tier's segments it lies; empty in the NVMe tier, where it is a file."""


class VersionRecord(msgspec.Struct, frozen=True):
    """What a header says."""

    manifest: Manifest
    objects: tuple[ObjectRecord, ...]
    """One for each section."""


def padded(nbytes: int, alignment: int = PAGE_BYTES) -> int:
    """`nbytes` rounded up."""
    return -(-nbytes // alignment) * alignment


def encode_page(magic: bytes, text: bytes) -> bytes:
    """`text` behind its length and checksum, filled up to whole pages."""
    head = _HEAD.pack(magic, len(text), xxhash.xxh3_64_intdigest(text)) + text
    return head.ljust(padded(len(head)), b"\0")


def decode_page(magic: bytes, start: bytes) -> bytes:
    """What `encode_page` was given.

    Raises:
        CorruptStateError: it did not make this.
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
    """Of the header of a version whose manifest takes `manifest_bytes` as JSON."""
    around = len('{"manifest":,"objects":}')
    return padded(_HEAD.size + around + manifest_bytes + len(msgspec.json.encode(objects)))


def digest_of(digests: Iterable[bytes]) -> str:
    """A version's digest, from those of its sections' blocks."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def encode_header(record: VersionRecord) -> bytes:
    """A version's header file."""
    return encode_page(MAGIC, msgspec.json.encode(record))


def decode_header(contents: bytes) -> VersionRecord:
    """What `encode_header` was given.

    Raises:
        CorruptStateError: it did not make this.
    """
    try:
        return msgspec.json.decode(decode_page(MAGIC, contents), type=VersionRecord)
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"the header is damaged ({error}): restore a checkpoint") from error
