"""Versions of a shard: what one rank's state was after a given operation, and its file's layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote

import msgspec

from plexrl.statemanager.keys import ARENA_ALIGNMENT, StatePart, StateSlice


class VersionKind(StrEnum):
    """What a version is for."""

    STATE = "state"
    """To be loaded by the rank that it was taken from."""
    PUBLISHED = "published"
    """Parameters for other deployments to pull; never changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of bytes that lies in one piece both in the arena and in the version's file."""

    arena_offset: int
    file_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One complete version of one shard. It is written after the bytes: no manifest, no version."""

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
    nbytes: int
    digest: str = ""
    """Hex xxh3-128 of the file's `nbytes` bytes; absent where the tier needs none."""

    @property
    def name(self) -> str:
        """Unique among all versions of a node, and a safe file name."""
        return f"{quote(self.deployment, safe='')}.{self.rank}.{self.kind}.{self.seq}"

    def with_digest(self, digest: str) -> "Manifest":
        """The same version with its bytes' digest."""
        return replace(self, digest=digest)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)


def manifest_from_json(text: bytes) -> Manifest:
    """Raises `msgspec.MsgspecError` for what `to_json` did not make."""
    return msgspec.json.decode(text, type=Manifest)


def lay_out(slices: Sequence[StateSlice]) -> tuple[tuple[Extent, ...], int]:
    """Extents for a file that holds `slices`, and its size in bytes.

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
            size = -(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
            extents.append(
                Extent(arena_offset=piece.arena_offset, file_offset=size, nbytes=piece.nbytes)
            )
        size = extents[-1].file_offset + extents[-1].nbytes
    return tuple(extents), size


def slices_in_file(manifest: Manifest) -> tuple[StateSlice, ...]:
    """The version's slices, their `arena_offset` replaced by the place in the file."""
    found = []
    for piece in manifest.slices:
        if piece.nbytes == 0:
            found.append(piece)
            continue
        home = next(
            extent
            for extent in manifest.extents
            if extent.arena_offset <= piece.arena_offset < extent.arena_offset + extent.nbytes
        )
        place = home.file_offset + piece.arena_offset - home.arena_offset
        found.append(replace(piece, arena_offset=place))
    return tuple(found)
