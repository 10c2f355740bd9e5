"""The tiny state of a paced worker: real bytes that are moved, published and pulled, without torch.

All paced models have one parameter of `ELEMENTS` numbers, whatever they model. Ranks that divide it
have consecutive parts. Values are float32 and change by elementwise operations in a fixed order, so
the same calls give the same bits in any process.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import (
    ARENA_ALIGNMENT,
    DTYPE_BYTES,
    StateKey,
    StatePart,
    StateSlice,
)
from plexrl.wire.tensors import Array, Arrays

ELEMENTS = 4096
NAME = "paced.weight"
WEIGHT = StateKey(part=StatePart.PARAMETER, name=NAME)
GRADIENT = StateKey(part=StatePart.GRADIENT, name=NAME)
MOMENT = StateKey(part=StatePart.OPTIMIZER, name=f"{NAME}/exp_avg")
STEP = StateKey(part=StatePart.OPTIMIZER, name="step")


class PacedState:
    """One rank's part of the state, in its arena."""

    def __init__(self, keys: Sequence[StateKey], *, part: int, parts: int) -> None:
        """Addresses only: the arena has no memory yet. `part` of `parts` equal ones is this
        rank's."""
        first, end = part * ELEMENTS // parts, (part + 1) * ELEMENTS // parts
        nbytes, slices = 0, []
        for key in keys:
            is_one = key == STEP
            shape = () if is_one else (end - first,)
            piece = StateSlice(
                key=key,
                dtype="F32",
                global_shape=() if is_one else (ELEMENTS,),
                offset=() if is_one else (first,),
                shape=shape,
                arena_offset=nbytes,
            )
            slices.append(piece)
            nbytes += -(-max(piece.nbytes, 1) // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        self.slices = tuple(slices)
        self.first = first
        self.arena = Arena(nbytes)

    def __getitem__(self, key: StateKey) -> Array:
        """The values of a key, in the arena's memory. float32 [elements of this rank]"""
        piece = next(stored for stored in self.slices if stored.key == key)
        assert piece.dtype == "F32", "other types are only moved and digested"
        count = piece.nbytes // DTYPE_BYTES[piece.dtype]
        return np.frombuffer(
            self.arena.buffer, dtype=np.float32, count=count, offset=piece.arena_offset
        )

    def weights_word(self) -> int:
        """A number of 64 bits that depends on every bit of this rank's weights."""
        piece = next(stored for stored in self.slices if stored.key == WEIGHT)
        start = piece.arena_offset
        return word_of(bytes(self.arena.buffer[start : start + piece.nbytes]))


def initial_weights(seed: int, first: int, count: int) -> Array:
    """The weights before the first step, from element `first` on. float32 [count], in [-1, 1)"""
    return signed_units(np.arange(first, first + count, dtype=np.uint64), seed & (1 << 64) - 1)


def word_of(content: bytes) -> int:
    """A digest of 64 bits."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def word_of_arrays(arrays: Arrays) -> int:
    """A digest of 64 bits of names and values."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return int.from_bytes(digest.digest(), "little")


def hashed(values: Array, word: int) -> Array:
    """splitmix64 of each value and the word. uint64 [values]"""
    mixed = values.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(word)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Array = mixed ^ (mixed >> np.uint64(31))
    return found


def signed_units(values: Array, word: int) -> Array:
    """Hashes as numbers in [-1, 1). float32 [values]"""
    # 24 bits are exact in float32.
    units: Array = (hashed(values, word) >> np.uint64(40)).astype(np.float32)
    return units / np.float32(1 << 23) - np.float32(1.0)


def logprobs_of(tokens: Array, word: int) -> Array:
    """A logprob for each token, by its place and the weights. float32 [tokens], in [-2, 0)"""
    places = np.arange(len(tokens), dtype=np.uint64) * np.uint64(1 << 32)
    return signed_units(places + tokens.astype(np.uint64), word) - np.float32(1.0)
