"""A digest is the one that plain integers give, wherever the bytes lie."""

import hashlib
import operator
import struct
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.statemanager.layout.versions import Extent, Section
from plexrl.statemanager.protocol.messages import ReplicatedSection
from plexrl.worker.state.contents.device_digest import CHUNK_ROWS, LANES, ROW_BYTES, DeviceDigests
from tests.examples import examples

ALIGNMENT = 256
START = 8192
"""Offset of the section in its version's data."""

Pieces = Sequence[tuple[int, int]]
"""(offset in the section, bytes) of each extent."""


def oracle(contents: bytes) -> str:
    """The digest by integers, one row after the other."""
    level = 0
    while True:
        stream = hashlib.shake_128(f"plexrl device digest, level {level}".encode())
        drawn = struct.unpack("<524288b", stream.digest(524288))
        keys = [drawn[lane::32] for lane in range(32)]
        contents = contents.ljust(-(-len(contents) // ROW_BYTES) * ROW_BYTES, b"\0")
        sums: list[int] = []
        known: dict[bytes, list[int]] = {}
        for first in range(0, len(contents), ROW_BYTES):
            row = contents[first : first + ROW_BYTES]
            if row not in known:
                values = struct.unpack("<16384b", row)
                known[row] = [sum(map(operator.mul, values, lane)) for lane in keys]
            sums += known[row]
        contents = struct.pack(f"<{len(sums)}i", *sums)
        if len(contents) <= ROW_BYTES:
            return hashlib.blake2b(contents, digest_size=32).hexdigest()
        level += 1


def digest(contents: bytes, pieces: Pieces, *, gap: int = 0) -> str:
    """The digest of a section whose extents lie `gap` bytes apart in an arena of other bytes."""
    extents, parts, at = [], [], 0
    for offset, nbytes in pieces:
        parts.append(b"\xa5" * gap + contents[offset : offset + nbytes])
        at += gap
        extents.append(Extent(arena_offset=at, file_offset=START + offset, nbytes=nbytes))
        rest = -(at + nbytes) % ALIGNMENT
        parts.append(b"\x5a" * rest)
        at += nbytes + rest
    memory = torch.tensor(np.frombuffer(b"".join(parts), np.uint8).copy())
    section = Section(start=START, nbytes=len(contents), share_key="key")
    wanted = ReplicatedSection(section=section, extents=tuple(extents))
    return DeviceDigests().of_sections(memory, [wanted])["key"]


def whole(contents: bytes) -> str:
    return digest(contents, [(0, len(contents))])


@st.composite
def sections(draw: st.DrawFn) -> tuple[bytes, Pieces]:
    """Bytes that begin with an extent; between extents they are zero."""
    pieces, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        nbytes = draw(st.integers(1, 12_000))
        pieces.append((at, nbytes))
        at = -(-(at + nbytes) // ALIGNMENT) * ALIGNMENT
    contents = bytearray(sum(pieces[-1]))
    extreme = draw(st.booleans())
    numbers = np.random.default_rng(draw(st.integers(0, 1000)))
    for offset, nbytes in pieces:
        drawn = bytes([draw(st.sampled_from((0x00, 0x7F, 0x80, 0xFF)))]) * nbytes
        contents[offset : offset + nbytes] = drawn if extreme else numbers.bytes(nbytes)
    return bytes(contents), pieces


@settings(max_examples=examples(25))
@given(section=sections(), gap=st.sampled_from((0, 256, 1024)))
def test_a_digest_is_that_of_the_bytes_wherever_they_lie(
    section: tuple[bytes, Pieces], gap: int
) -> None:
    contents, pieces = section
    assert digest(contents, pieces, gap=gap) == oracle(contents)


def test_several_levels_and_chunks_give_what_integers_give() -> None:
    numbers = np.random.default_rng(3)
    drawn = hashlib.shake_128(b"plexrl device digest, level 0").digest(ROW_BYTES * LANES)
    lane = np.frombuffer(drawn, np.int8)[::LANES]
    largest = np.where(lane < 0, -128, 127).astype(np.int8)
    kinds = [largest.tobytes(), *(numbers.bytes(ROW_BYTES) for _ in range(4))]
    chosen = numbers.integers(0, len(kinds), CHUNK_ROWS + 2)
    contents = b"".join(kinds[kind] for kind in chosen) + b"the last row"
    cut = 100 * ROW_BYTES + 256
    assert digest(contents, [(0, cut), (cut, len(contents) - cut)], gap=256) == oracle(contents)


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 10**6),
    place=st.integers(0, 19_999),
    flips=st.lists(st.integers(0, 7), min_size=1, max_size=2, unique=True),
)
def test_a_bit_that_differs_changes_the_digest(seed: int, place: int, flips: list[int]) -> None:
    contents = bytearray(np.random.default_rng(seed).bytes(20_000))
    before = whole(bytes(contents))
    contents[place] ^= sum(1 << bit for bit in flips)
    assert whole(bytes(contents)) != before


def test_signs_rows_and_words_that_change_places_change_the_digest() -> None:
    """What sums without keys, or modulo a power of two, would not see."""
    contents = np.random.default_rng(1).bytes(4 * ROW_BYTES)
    found = {whole(contents)}
    words = np.frombuffer(contents, np.int16)
    signs = words.copy()
    signs[[3, 9000]] ^= -0x8000
    swapped = words.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    rows = words.reshape(4, -1)[[1, 0, 2, 3]]
    moved = words.reshape(4, -1).copy()
    moved[0], moved[1] = moved[0] + 1, moved[1] - 1
    for each in (signs, swapped, rows, moved):
        found.add(whole(each.tobytes()))
    assert len(found) == 5
