"""Digests of parts of an arena, computed on its device: no byte of them is copied to the host.

Ranks that hold replicas report digests to the StateManager, so that one rank's bytes are copied out
for all of them. The arithmetic is that of integers, so a digest depends on the bytes alone:

- The bytes, from -128 to 127, stand in rows of `ROW_BYTES`, with zeros to the end of the last row.
- Each row becomes `LANES` sums of its bytes, each byte times the 8-bit key of its place and lane.
  Matrices of float32 are multiplied, because GPUs multiply matrices of integers neither fast nor in
  all torch versions, and many have slow float64. Within a block of 1024 bytes no sum exceeds 2^24,
  so float32 represents all of them, in whatever order a device adds. Bytes and keys are the same in
  TF32 and bfloat16, so it makes no difference if a framework allows these for float32. The sums of
  a row's blocks are added as integers.
- The sums, as int32, are the bytes of the next level, 128 times fewer. At each level the keys are
  others. The digest is BLAKE2b of the first level that fits a row.

With keys drawn at random, two rows that differ have equal sums in a lane with probability 2^-8 at
most, because for any other keys at most one key of a byte that differs makes them equal. The lanes
are independent: 2^-256. The keys are constants, so this holds for data that was not made with them
in mind. A rank could also report a false digest; it would damage the state of its own deployment
only, because no other shares sections with it.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.layout.versions import Extent
from plexrl.statemanager.protocol.messages import ReplicatedSection

BLOCK_BYTES = 1024
ROW_BLOCKS = 16
ROW_BYTES = ROW_BLOCKS * BLOCK_BYTES
LANES = 32
CHUNK_ROWS = 1024
"""Rows that are widened to float32 at a time, which takes four times their 16 MiB."""


class DeviceDigests:
    """Computes digests of sections. Keeps the keys, in host memory."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        """Keys of each level, [blocks, bytes, lanes] int8."""

    def of_sections(
        self, memory: torch.Tensor, sections: Sequence[ReplicatedSection]
    ) -> dict[str, str]:
        """Hex digests by share key. Bytes of a section that no extent covers count as zero.

        Args:
            memory: the arena. [nbytes] uint8, on any device.
            sections: sections of the arena's data.
        """
        return {section.section.share_key: self._digest(memory, section) for section in sections}

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
        """A level's keys. [blocks, bytes, lanes] float32 on the device."""
        while len(self._keys) <= level:
            self._keys.append(torch.from_numpy(_make_keys(len(self._keys))))
        return self._keys[level].to(device).float()


def _row_sums(
    memory: torch.Tensor, extents: ExtentMap, start: int, nbytes: int, keys: torch.Tensor
) -> torch.Tensor:
    """Sums of the rows of `nbytes` of the data from offset `start` on. [rows, lanes] int32."""
    rows = -(-nbytes // ROW_BYTES)
    sums = torch.empty((rows, LANES), dtype=torch.int32, device=memory.device)
    buffer = keys.new_empty((min(rows, CHUNK_ROWS), ROW_BLOCKS, BLOCK_BYTES))
    for first in range(0, rows, CHUNK_ROWS):
        values = buffer[: rows - first]
        begin = start + first * ROW_BYTES
        end = min(start + nbytes, begin + values.numel())
        _widen(memory, list(extents.overlaps(begin, end)), begin, values.view(-1))
        of_blocks = values.transpose(0, 1) @ keys
        sums[first : first + len(values)] = of_blocks.int().sum(0, dtype=torch.int32)
    return sums


def _widen(
    memory: torch.Tensor, runs: Sequence[tuple[int, int, int]], begin: int, values: torch.Tensor
) -> None:
    """Fill `values` with the data from offset `begin` on.

    Args:
        memory: as in `of_sections`.
        runs: (offset in the memory, offset in the data, bytes).
        begin: an offset in the data.
        values: [bytes] float32.
    """
    if sum(nbytes for _, _, nbytes in runs) < len(values):
        values.zero_()
    for offset, at, nbytes in runs:
        place = at - begin
        values[place : place + nbytes] = memory[offset : offset + nbytes].view(torch.int8)


def _make_keys(level: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int8]]:
    """Keys of a level. [blocks, bytes, lanes]"""
    stream = hashlib.shake_128(f"plexrl device digest, level {level}".encode())
    drawn = np.frombuffer(stream.digest(ROW_BYTES * LANES), np.int8)
    return drawn.reshape(ROW_BLOCKS, BLOCK_BYTES, LANES).copy()
