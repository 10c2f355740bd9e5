"""What differs between two versions of the same bytes, block by block. Pure.

A training step of RL changes few bytes of the weights as they are served (1 to 3 % in published
runs: small updates vanish in rounding to BF16). So the bytes as they arrive, after any cast, are
compared in small blocks, and only blocks that differ travel:

    for every batch of runs: a bit for each block | the blocks whose bit is set

Both ends cut the same runs into the same batches, so no lengths travel. The last block of a batch
is filled up with zeros.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plexrl.errors import CorruptStateError, InvalidRequestError
from plexrl.statemanager.runs import Runs

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

BATCH_BYTES = 256 << 10
"""Compared at a time: two versions of it stay in the processor's cache."""
_WORD_BYTES = 8
_STRIDE_BYTES = _WORD_BYTES * _WORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPolicy:
    """Whether and how a pull brings only what has changed."""

    block_bytes: int = 128
    """A multiple of 64. Larger ones cost fewer bits for what is unchanged, and carry more unchanged
    bytes along with what is not."""
    changed_max: float = 0.5
    """Where a greater fraction of the blocks has changed, all bytes are sent as they are."""
    in_memory: bool = True
    """Also where the source is in this machine's memory, and comparing takes two to four times as
    long as copying."""

    def __post_init__(self) -> None:
        if self.block_bytes < _STRIDE_BYTES or self.block_bytes % _STRIDE_BYTES:
            raise InvalidRequestError(f"block_bytes is a multiple of {_STRIDE_BYTES}")
        if not 0 <= self.changed_max <= 1:
            raise InvalidRequestError("changed_max is a fraction")


def batches(runs: Runs) -> Iterator[Runs]:
    """The runs as both ends cut them."""
    return runs.batches(BATCH_BYTES)


def changed_blocks(old: Bytes, new: Bytes, block_bytes: int) -> Flags:
    """Whether each block of two memories of one size differs. Exact, and about as fast as memory
    is read."""
    nbytes = len(new)
    whole = nbytes // block_bytes * block_bytes
    count = -(-nbytes // block_bytes)
    flags = np.empty(count, dtype=np.bool_)
    if whole:
        words = old[:whole].view(np.uint64) != new[:whole].view(np.uint64)
        # Eight comparisons, a byte each, are one word.
        eights = words.view(np.uint64)
        per_block = block_bytes // _STRIDE_BYTES
        found = eights[::per_block].copy()
        for step in range(1, per_block):
            found |= eights[step::per_block]
        np.not_equal(found, 0, out=flags[: whole // block_bytes])
    if whole < nbytes:
        flags[-1] = not np.array_equal(old[whole:], new[whole:])
    return flags


def encode(flags: Flags, new: Bytes, block_bytes: int) -> tuple[bytes, bytes]:
    """The bits and the blocks of one batch."""
    full = len(new) // block_bytes
    blocks = new[: full * block_bytes].reshape(full, block_bytes)[flags[:full]].tobytes()
    if full < len(flags) and flags[-1]:
        blocks += new[full * block_bytes :].tobytes().ljust(block_bytes, b"\0")
    return np.packbits(flags).tobytes(), blocks


class DeltaDecoder:
    """Reads what `encode` made of one batch after the other."""

    def __init__(self, payload: memoryview, block_bytes: int) -> None:
        self._payload = np.frombuffer(payload, dtype=np.uint8)
        self._block_bytes = block_bytes
        self._at = 0

    def apply(self, batch: Bytes) -> bool:
        """Turn the old bytes of the next batch into the new; whether any differ.

        Raises:
            CorruptStateError: the payload is not of these batches.
        """
        size = self._block_bytes
        count = -(-len(batch) // size)
        flags = np.unpackbits(self._take(-(-count // 8)), count=count).view(np.bool_)
        changed = int(np.count_nonzero(flags))
        if not changed:
            return False
        blocks = self._take(changed * size).reshape(changed, size)
        full = len(batch) // size
        has_tail = full < count and bool(flags[-1])
        batch[: full * size].reshape(full, size)[flags[:full]] = blocks[:-1] if has_tail else blocks
        if has_tail:
            batch[full * size :] = blocks[-1, : len(batch) - full * size]
        return True

    def finish(self) -> None:
        """Raises CorruptStateError: something is left."""
        if self._at != len(self._payload):
            raise CorruptStateError("a delta is longer than the runs that it is of: pull again")

    def _take(self, nbytes: int) -> Bytes:
        taken = self._payload[self._at : self._at + nbytes]
        if len(taken) != nbytes:
            raise CorruptStateError("a delta is shorter than the runs that it is of: pull again")
        self._at += nbytes
        return taken
