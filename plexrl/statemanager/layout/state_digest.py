"""Checksum of a rank's state, independent of the offsets of its tensors. Pure."""

from collections.abc import Sequence

import msgspec
import xxhash

from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.plan.columns import Bytes


def digest_of_slices(slices: Sequence[StateSlice], memory: Bytes) -> str:
    """Hex xxh3-128 of the slices' descriptions and bytes, in the order of their keys.

    `memory` holds the slices at their `arena_offset`. Two ranks that hold the same boxes in the
    same dtype with the same bits have equal digests.
    """
    digest = xxhash.xxh3_128()
    for piece in sorted(slices, key=lambda piece: (piece.key, piece.offset)):
        description = (piece.key, piece.dtype, piece.global_shape, piece.offset, piece.shape)
        digest.update(msgspec.json.encode(description))
        digest.update(memory[piece.arena_offset : piece.arena_offset + piece.nbytes].data)
    return digest.hexdigest()
