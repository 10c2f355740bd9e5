"""One digest of a rank's state, whatever place each tensor has in memory. Pure."""

from collections.abc import Sequence

import msgspec
import xxhash

from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.transfer.copy.strided_copy import Bytes


def digest_of_slices(slices: Sequence[StateSlice], memory: Bytes) -> str:
    """Hex xxh3-128 of the slices' descriptions and bytes, in the order of their keys.

    `memory` is what `arena_offset` counts in. Equal for two ranks that hold the same boxes in the
    same dtype with the same bits.
    """
    digest = xxhash.xxh3_128()
    for piece in sorted(slices, key=lambda piece: (piece.key, piece.offset)):
        told = (piece.key, piece.dtype, piece.global_shape, piece.offset, piece.shape)
        digest.update(msgspec.json.encode(told))
        digest.update(memory[piece.arena_offset : piece.arena_offset + piece.nbytes].data)
    return digest.hexdigest()
