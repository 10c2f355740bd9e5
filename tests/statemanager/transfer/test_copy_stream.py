"""The bytes of strided copies arrive in order, by whichever way their sender chooses."""

import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.statemanager.bytes.mapped_files import MappedData
from plexrl.statemanager.bytes.mapped_memory import Region
from plexrl.statemanager.layout.strided.copies import BYTES_CAST, StridedCopies
from plexrl.statemanager.transfer.transport.copy_stream import (
    DIRECT_BYTES_MIN,
    ROW_BYTES_MIN,
    ROWS_MAX,
    Digest,
    receive_copies,
    send_copies,
)
from tests.examples import examples

Bytes = npt.NDArray[np.uint8]
DATA_BYTES = 3 << 20
REGIONS = (0, 1 << 20, (1 << 20) + 70_000)
"""Offsets in the data at which a region begins; each is a piece of one file, in another order."""
TIMEOUT_S = 20.0


@contextmanager
def stored(contents: Bytes) -> Iterator[tuple[list[Region], MappedData]]:
    """The contents in regions of a memory file."""
    fd = os.memfd_create("plexrl-test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 2 * DATA_BYTES)
        mapped = np.frombuffer(mmap.mmap(fd, 2 * DATA_BYTES), dtype=np.uint8)
        regions, at = [], 4096
        ends = (*REGIONS[1:], DATA_BYTES)
        for start, end in reversed(list(zip(REGIONS, ends, strict=True))):
            mapped[at : at + end - start] = contents[start:end]
            regions.append(Region(fd=fd, offset=at, nbytes=end - start, data_offset=start))
            at += end - start + 4096
        regions.reverse()
        yield regions, MappedData.of(regions, {fd: mapped})
    finally:
        os.close(fd)


def copies_of(rows: list[tuple[int, int, int, int]]) -> StridedCopies:
    """Copies (offset, row bytes, count, gap) to consecutive offsets."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    sizes = columns[1] * columns[2]
    return StridedCopies(
        src_offsets=columns[0],
        dst_offsets=np.cumsum(sizes) - sizes,
        items=columns[1],
        counts=columns[2],
        src_strides=columns[1] + columns[3],
        dst_strides=columns[1],
        casts=np.full(len(rows), BYTES_CAST),
    )


def expected(contents: Bytes, rows: list[tuple[int, int, int, int]]) -> bytes:
    """Row by row, as slowly as it is obvious."""
    return b"".join(
        contents[at : at + size].tobytes()
        for offset, size, count, gap in rows
        for at in range(offset, offset + count * (size + gap), size + gap)
    )


def sent(contents: Bytes, rows: list[tuple[int, int, int, int]], *, verify: bool) -> bytes:
    copies = copies_of(rows)
    target = np.zeros(copies.nbytes, dtype=np.uint8)
    near, far = socket.socketpair()
    with near, far, stored(contents) as (regions, data):
        # A small buffer: the sender has to wait in the middle of a call.
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        sender = threading.Thread(
            target=send_copies, args=(near, regions, data, copies, Digest(verify))
        )
        sender.start()
        receive_copies(far, copies, target, Digest(verify))
        sender.join(TIMEOUT_S)
        assert not sender.is_alive()
    return target.tobytes()


CONTENTS: Bytes = np.random.default_rng(1).integers(0, 256, DATA_BYTES, dtype=np.uint8)
SIZES = st.sampled_from((16, ROW_BYTES_MIN - 1, ROW_BYTES_MIN, 5000, DIRECT_BYTES_MIN, 200_000))


@st.composite
def row_lists(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    found = []
    for _ in range(draw(st.integers(1, 8))):
        size, gap = draw(SIZES), draw(st.sampled_from((0, 1, 4096)))
        count = draw(st.integers(1, max(1, min(1500, 1_000_000 // (size + gap)))))
        offset = draw(st.integers(0, DATA_BYTES - count * (size + gap)))
        found.append((offset, size, count, gap))
    return found


@pytest.mark.parametrize("verify", [False, True])
@given(rows=row_lists())
@settings(max_examples=examples(60), deadline=None)
def test_the_bytes_arrive_in_the_order_of_the_copies(
    rows: list[tuple[int, int, int, int]], verify: bool
) -> None:
    assert sent(CONTENTS, rows, verify=verify) == expected(CONTENTS, rows)


def test_more_rows_than_one_system_call_takes() -> None:
    rows = [(0, ROW_BYTES_MIN, 480, 64), (4096, ROW_BYTES_MIN, 480, 0), (9, 2050, 480, 1)]
    assert sum(count for _, _, count, _ in rows) > ROWS_MAX
    assert sent(CONTENTS, rows, verify=False) == expected(CONTENTS, rows)


def test_rows_on_both_sides_of_a_region_s_edge() -> None:
    edge = REGIONS[1]
    rows = [
        (edge - 3 * 3000, 3000, 6, 0),
        (edge - 3000, 3000, 1, 0),
        (edge, 3000, 5, 7),
        (edge - 1500, 3000, 2, 0),
    ]
    assert sent(CONTENTS, rows, verify=False) == expected(CONTENTS, rows)
