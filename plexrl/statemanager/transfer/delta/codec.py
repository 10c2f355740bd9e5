"""Wire format of a delta: each batch in its shortest form. Pure.

    form | …
    NONE    nothing: the batch is unchanged
    BLOCKS  a bit for each block | the blocks whose bit is set, the last padded with zeros
    GAPS    u32 words | u32 bytes of gaps | gaps | words | tail
    BITS    a bit for each word | the words whose bit is set | tail
    RAW     the batch

A small training step changes single elements everywhere: few blocks stay unchanged, but few words
change. GAPS and BITS therefore send the changed 16-bit words, located by the gaps between them (one
byte each; 255 continues the gap) or by a bit for every word. `tail` is the last byte of a batch of
odd length. All numbers are little-endian.
"""

import struct
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from plexrl.errors import CorruptStateError
from plexrl.statemanager.layout.plan.columns import Bytes

Flags = npt.NDArray[np.bool_]

WORD_BYTES = 2
_WORD = np.dtype("<u2")
_GOES_ON = 255
_GAPS_HEAD = struct.Struct("<II")


class Form(IntEnum):
    """Encoding of a batch."""

    NONE = 0
    BLOCKS = 1
    GAPS = 2
    BITS = 3
    RAW = 4


def encode(old: Bytes, new: Bytes, block_bytes: int) -> bytes:
    """Encode one batch; both memories have the same size."""
    even = len(new) // WORD_BYTES * WORD_BYTES
    words = new[:even].view(_WORD)
    places = np.flatnonzero(old[:even].view(_WORD) != words)
    blocks = places // (block_bytes // WORD_BYTES)
    changed = int(np.count_nonzero(np.diff(blocks))) + 1 if len(blocks) else 0
    tail = len(new) - even
    if tail and old[-1] != new[-1] and (not changed or blocks[-1] != (len(new) - 1) // block_bytes):
        blocks = np.append(blocks, (len(new) - 1) // block_bytes)
        changed += 1
    if not changed:
        return bytes([Form.NONE])
    gaps = np.diff(places, prepend=-1) - 1
    # Dividing all gaps takes longer than looking for a wide one.
    goes_on = gaps // _GOES_ON if len(gaps) and gaps.max() >= _GOES_ON else None
    gap_bytes = len(places) + (0 if goes_on is None else int(goes_on.sum()))
    block_count = -(-len(new) // block_bytes)
    sizes = {
        Form.BLOCKS: -(-block_count // 8) + changed * block_bytes,
        Form.GAPS: _GAPS_HEAD.size + gap_bytes + len(places) * WORD_BYTES + tail,
        Form.BITS: -(-len(words) // 8) + len(places) * WORD_BYTES + tail,
        Form.RAW: len(new),
    }
    form = min(sizes, key=lambda each: sizes[each])
    head = bytes([form])
    match form:
        case Form.BLOCKS:
            flags = _flags(blocks, block_count)
            return head + np.packbits(flags).tobytes() + _blocks(flags, new, block_bytes)
        case Form.GAPS:
            coded = gaps.astype(np.uint8)
            if goes_on is not None:
                coded = np.full(gap_bytes, _GOES_ON, dtype=np.uint8)
                coded[np.cumsum(goes_on + 1) - 1] = gaps % _GOES_ON
            counts = _GAPS_HEAD.pack(len(places), gap_bytes)
            found = words[places].tobytes()
            return head + counts + coded.tobytes() + found + new[even:].tobytes()
        case Form.BITS:
            bits = np.packbits(_flags(places, len(words))).tobytes()
            return head + bits + words[places].tobytes() + new[even:].tobytes()
        case _:
            return head + new.tobytes()


class DeltaDecoder:
    """Decodes the batches of a delta in order."""

    def __init__(self, payload: memoryview, block_bytes: int) -> None:
        self._payload = np.frombuffer(payload, dtype=np.uint8)
        self._block_bytes = block_bytes
        self._at = 0

    def apply(self, batch: Bytes) -> bool:
        """Update the next batch from old to new bytes; returns whether any differ.

        Raises:
            CorruptStateError: the payload does not match these batches.
        """
        if not len(batch):
            return False
        form = int(self._take(1)[0])
        match form:
            case Form.NONE:
                return False
            case Form.BLOCKS:
                self._apply_blocks(batch)
            case Form.GAPS:
                self._apply_gaps(batch)
            case Form.BITS:
                count = len(batch) // WORD_BYTES
                bits = np.unpackbits(self._take(-(-count // 8)), count=count)
                self._apply_words(batch, np.flatnonzero(bits))
            case Form.RAW:
                batch[:] = self._take(len(batch))
            case _:
                raise CorruptStateError(
                    f"a delta has a batch of the unknown form {form}: pull all bytes"
                )
        return True

    def finish(self) -> None:
        """Raises CorruptStateError: the payload is longer than the batches."""
        if self._at != len(self._payload):
            raise CorruptStateError("a delta is longer than its batches: pull again")

    def _apply_blocks(self, batch: Bytes) -> None:
        size = self._block_bytes
        count = -(-len(batch) // size)
        flags = np.unpackbits(self._take(-(-count // 8)), count=count).view(np.bool_)
        blocks = self._take(int(np.count_nonzero(flags)) * size).reshape(-1, size)
        full = len(batch) // size
        has_tail = full < count and bool(flags[-1])
        batch[: full * size].reshape(full, size)[flags[:full]] = blocks[:-1] if has_tail else blocks
        if has_tail:
            batch[full * size :] = blocks[-1, : len(batch) - full * size]

    def _apply_gaps(self, batch: Bytes) -> None:
        count, gap_bytes = _GAPS_HEAD.unpack(self._take(_GAPS_HEAD.size).tobytes())
        coded = self._take(gap_bytes)
        ends = np.flatnonzero(coded != _GOES_ON)
        if len(ends) != count:
            raise CorruptStateError("a delta's gaps do not match its words: pull all bytes")
        places = np.cumsum(coded, dtype=np.int64)[ends] + np.arange(count)
        if count and places[-1] >= len(batch) // WORD_BYTES:
            raise CorruptStateError("a delta exceeds its batch: pull all bytes")
        self._apply_words(batch, places)

    def _apply_words(self, batch: Bytes, places: npt.NDArray[np.int64]) -> None:
        even = len(batch) // WORD_BYTES * WORD_BYTES
        batch[:even].view(_WORD)[places] = self._take(len(places) * WORD_BYTES).view(_WORD)
        batch[even:] = self._take(len(batch) - even)

    def _take(self, nbytes: int) -> Bytes:
        taken = self._payload[self._at : self._at + nbytes]
        if len(taken) != nbytes:
            raise CorruptStateError("a delta is shorter than its batches: pull again")
        self._at += nbytes
        return taken


def _flags(places: npt.NDArray[np.int64], count: int) -> Flags:
    flags = np.zeros(count, dtype=np.bool_)
    flags[places] = True
    return flags


def _blocks(flags: Flags, new: Bytes, block_bytes: int) -> bytes:
    full = len(new) // block_bytes
    blocks = new[: full * block_bytes].reshape(full, block_bytes)[flags[:full]].tobytes()
    if full < len(flags) and flags[-1]:
        blocks += new[full * block_bytes :].tobytes().ljust(block_bytes, b"\0")
    return blocks
