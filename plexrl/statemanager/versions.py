"""Versions of a shard: what one rank's state was after a given operation, and its file's format.

    magic | u64 bytes of JSON | u64 xxh3 of JSON | manifest as JSON | zeros | data

The data starts on a page boundary and is as long as its manifest says. A file is written under
another name and renamed when it is whole, so a file that bears a version's name is that version.
"""

import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote

import msgspec
import xxhash

from plexrl.errors import CorruptStateError
from plexrl.statemanager.keys import ARENA_ALIGNMENT, StatePart, StateSlice

MAGIC = b"PLEXRLS1"
PAGE_BYTES = 4096

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
    """In file order; between them lie fewer than `ARENA_ALIGNMENT` bytes of nothing."""
    nbytes: int
    """Of the data."""
    ordinal: int = 0
    """Counts the versions that this node ever stored: of two of the same name the higher counts."""
    stamp: str = ""
    """Unique to these bytes: says that an arena which held them still does."""
    digest: str = NO_DIGEST
    """Hex xxh3-128 of the data; `NO_DIGEST` for what was saved to the host tier, which needs none,
    and has not left it since."""

    @property
    def name(self) -> str:
        """The same for every attempt at storing this version."""
        return f"{self.deployment}.{self.rank}.{self.kind}.{self.seq}"

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


def padded(nbytes: int, alignment: int = PAGE_BYTES) -> int:
    """`nbytes` rounded up."""
    return -(-nbytes // alignment) * alignment


def encode_header(manifest: Manifest) -> bytes:
    """Everything in front of the data; as long for one digest as for another."""
    text = msgspec.json.encode(manifest)
    head = _HEAD.pack(MAGIC, len(text), xxhash.xxh3_64_intdigest(text)) + text
    return head.ljust(padded(len(head)), b"\0")


def decode_header(start: bytes) -> tuple[Manifest, int]:
    """The manifest that a file beginning with `start` bears, and where its data begins.

    Raises:
        CorruptStateError: `encode_header` did not make this.
    """
    try:
        magic, length, checksum = _HEAD.unpack_from(start)
        text = start[_HEAD.size : _HEAD.size + length]
        if magic != MAGIC or len(text) < length or xxhash.xxh3_64_intdigest(text) != checksum:
            raise CorruptStateError("the header is damaged: restore a checkpoint")
        return msgspec.json.decode(text, type=Manifest), padded(_HEAD.size + length)
    except (struct.error, msgspec.MsgspecError) as error:
        raise CorruptStateError(f"the header is damaged ({error}): restore a checkpoint") from error


def lay_out(slices: Sequence[StateSlice]) -> tuple[tuple[Extent, ...], int]:
    """Extents for a file that holds `slices`, and the size of its data.

    Slices that follow each other in the arena up to alignment make one extent, so that a move is a
    few long copies whatever the number of tensors.
    """
    extents: list[Extent] = []
    size = 0
    for piece in sorted(slices, key=lambda s: s.arena_offset):
        if piece.nbytes == 0:
            continue
        last = extents[-1] if extents else None
        end = -1 if last is None else last.arena_offset + last.nbytes
        if last is not None and 0 <= piece.arena_offset - end < ARENA_ALIGNMENT:
            nbytes = piece.arena_offset + piece.nbytes - last.arena_offset
            extents[-1] = replace(last, nbytes=nbytes)
        else:
            start = padded(size, ARENA_ALIGNMENT)
            extents.append(
                Extent(arena_offset=piece.arena_offset, file_offset=start, nbytes=piece.nbytes)
            )
        size = extents[-1].file_offset + extents[-1].nbytes
    return tuple(extents), size


def slices_in_file(manifest: Manifest, data_offset: int) -> tuple[StateSlice, ...]:
    """The version's slices, each `arena_offset` replaced by the place in the file."""
    starts = [extent.arena_offset for extent in manifest.extents]
    found = []
    for piece in manifest.slices:
        place = 0
        if piece.nbytes:
            home = manifest.extents[bisect_right(starts, piece.arena_offset) - 1]
            place = data_offset + home.file_offset + piece.arena_offset - home.arena_offset
        found.append(replace(piece, arena_offset=place))
    return tuple(found)
