"""Digests of parts of an arena, computed on its device: no byte of them is copied to the host.

Ranks that hold replicas report digests to the StateManager, so that one rank's bytes are copied out
for all of them. The arithmetic is that of integers, so a digest depends on the bytes alone:

- The bytes are 16-bit words in rows of `ROW_WORDS`, and zeros to the end of the last row.
- Each row becomes `LANES` sums of its words, each word times the 26-bit key of its place and lane.
  No sum exceeds 2^52, so float64 represents all of them, in whatever order a device adds. The type
  is float64 because GPUs multiply matrices of integers neither fast nor in all torch versions.
- The sums, as int64, are the bytes of the next level, 128 times fewer. At each level the keys are
  others. The digest is BLAKE2b of the first level that fits a row.

With keys drawn at random, two rows that differ have equal sums in a lane with probability 2^-26 at
most, because for any other keys at most one key of a word that differs makes them equal. The lanes
are independent: 2^-208. The keys are constants, so this holds for data that was not made with them
in mind. A rank could also report a false digest; it would damage the state of its own deployment
only, because no other shares sections with it.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.protocol.messages import ReplicatedSection
from plexrl.statemanager.store.versions.versions import Extent

ROW_WORDS = 4096
ROW_BYTES = 2 * ROW_WORDS
LANES = 8
KEY_BITS = 26
CHUNK_ROWS = 2048
"""Rows that are widened to float64 at a time, which takes four times their 16 MiB."""


class DeviceDigests:
    """Computes digests of sections. Keeps the keys, in host memory."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        """Of each level: [words, lanes] float64."""

    def of_sections(
        self, memory: torch.Tensor, sections: Sequence[ReplicatedSection]
    ) -> dict[str, str]:
        """Hex digests by share key. Bytes of a section that no extent covers count as zero.

        Args:
            memory: the arena. [nbytes] uint8, on any device.
            sections: sections of the arena's data.
        """
        return {each.section.share_key: self._digest(memory, each) for each in sections}

    def _digest(self, memory: torch.Tensor, wanted: ReplicatedSection) -> str:
        start, nbytes = wanted.section.start, wanted.section.nbytes
        sums = _row_sums(
            memory, ExtentMap(wanted.extents), start, nbytes, self._level(0, memory.device)
        )
        level = 1
        while sums.nbytes > ROW_BYTES:
            below = sums.view(-1).view(torch.uint8)
            whole = Extent(arena_offset=0, file_offset=0, nbytes=len(below))
            keys = self._level(level, memory.device)
            sums = _row_sums(below, ExtentMap([whole]), 0, len(below), keys)
            level += 1
        return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=32).hexdigest()

    def _level(self, level: int, device: torch.device) -> torch.Tensor:
        """A level's keys. [words, lanes] float64 on the device."""
        while len(self._keys) <= level:
            self._keys.append(torch.from_numpy(_make_keys(len(self._keys))))
        return self._keys[level].to(device)


def _row_sums(
    memory: torch.Tensor, extents: ExtentMap, start: int, nbytes: int, keys: torch.Tensor
) -> torch.Tensor:
    """Sums of the rows of `nbytes` of the data from offset `start` on. [rows, lanes] int64."""
    rows = -(-nbytes // ROW_BYTES)
    sums = torch.empty((rows, LANES), dtype=torch.int64, device=memory.device)
    buffer = keys.new_empty((min(rows, CHUNK_ROWS), ROW_WORDS))
    for first in range(0, rows, CHUNK_ROWS):
        words = buffer[: rows - first]
        begin = start + first * ROW_BYTES
        end = min(start + nbytes, begin + len(words) * ROW_BYTES)
        _widen(memory, list(extents.overlaps(begin, end)), begin, words.view(-1))
        sums[first : first + len(words)] = words @ keys
    return sums


def _widen(
    memory: torch.Tensor, runs: Sequence[tuple[int, int, int]], begin: int, words: torch.Tensor
) -> None:
    """Fill `words` with the data from offset `begin` on.

    Args:
        memory: as in `of_sections`.
        runs: (offset in the memory, offset in the data, bytes), both offsets even.
        begin: an even offset in the data.
        words: [words] float64.
    """
    if sum(nbytes for _, _, nbytes in runs) < 2 * len(words):
        words.zero_()
    for offset, at, nbytes in runs:
        place, whole = (at - begin) // 2, nbytes // 2
        words[place : place + whole] = memory[offset : offset + 2 * whole].view(torch.int16)
        if nbytes % 2:
            words[place + whole] = memory[offset + nbytes - 1]


def _make_keys(level: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Keys of a level, from -2^25 to 2^25 - 1. [words, lanes]"""
    stream = hashlib.shake_128(f"plexrl device digest, level {level}".encode())
    drawn = np.frombuffer(stream.digest(4 * ROW_WORDS * LANES), dtype="<u4") >> (32 - KEY_BITS)
    return drawn.reshape(ROW_WORDS, LANES).astype(np.float64) - (1 << KEY_BITS - 1)
