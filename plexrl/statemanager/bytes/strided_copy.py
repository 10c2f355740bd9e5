"""Strided copies between two mapped memories, on several threads if that is faster.

One thread does not saturate a machine's memory bandwidth; two often do. Threads take pieces from
one list, so that all end at about the same time. One thread performs small copies, because then the
interpreter, which threads share, is the bottleneck.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.layout.plan.columns import Bytes
from plexrl.statemanager.layout.strided.casts import NUMPY_DTYPES, cast
from plexrl.statemanager.layout.strided.copies import BYTES_CAST, StridedCopies, cast_names

THREADED_BYTES_MIN = 4 << 20
"""Minimum size of a threaded copy; a smaller one ends before a second thread wakes up."""
THREADED_COPY_BYTES_MIN = 128 << 10
"""Minimum average size of a copy."""
PIECE_BYTES = 8 << 20

Job = tuple[Bytes, StridedCopies]
"""A memory, and copies to read from it."""


class Copier:
    """Copies on the calling thread and `threads - 1` others. Thread-safe."""

    def __init__(self, threads: int = 2) -> None:
        self._others = max(0, threads - 1)
        self._pool = ThreadPoolExecutor(max(1, self._others), thread_name_prefix="plexrl-copy")

    def copy(self, jobs: Sequence[Job], target: Bytes) -> None:
        """Perform the copies of every job into `target`.

        Raises:
            ValueError: a copy exceeds a memory; nothing outside of either is touched.
        """
        nbytes = sum(copies.nbytes for _, copies in jobs)
        count = sum(len(copies) for _, copies in jobs)
        if (
            self._others == 0
            or nbytes < THREADED_BYTES_MIN
            or nbytes < count * THREADED_COPY_BYTES_MIN
        ):
            for source, copies in jobs:
                copy_strided(source, target, copies)
            return
        pieces = _Shared(
            (source, piece) for source, copies in jobs for piece in copies.batches(PIECE_BYTES)
        )
        futures = [self._pool.submit(_copy_all, pieces, target) for _ in range(self._others)]
        try:
            _copy_all(pieces, target)
        finally:
            _wait(futures)

    def close(self) -> None:
        """End the other threads."""
        self._pool.shutdown()


class _Shared:
    """An iterator for several threads."""

    def __init__(self, pieces: Iterator[Job]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()

    def take(self) -> Job | None:
        with self._lock:
            return next(self._pieces, None)


def _copy_all(pieces: _Shared, target: Bytes) -> None:
    while (piece := pieces.take()) is not None:
        source, copies = piece
        copy_strided(source, target, copies)


def _wait(futures: list[Future[None]]) -> None:
    for future in futures:
        future.result()


def copy_strided(source: Bytes, target: Bytes, copies: StridedCopies) -> None:
    """Perform copies on this thread. Raises as `Copier.copy`."""
    rows = zip(
        copies.src_offsets.tolist(),
        copies.dst_offsets.tolist(),
        copies.items.tolist(),
        copies.counts.tolist(),
        copies.src_strides.tolist(),
        copies.dst_strides.tolist(),
        copies.casts.tolist(),
        strict=True,
    )
    for place, to, items, count, stride, target_stride, code in rows:
        if count == 1 and code == BYTES_CAST:
            # numpy would silently truncate a slice that ends beyond its memory.
            if min(place, to) < 0 or place + items > len(source) or to + items > len(target):
                raise ValueError(f"a copy from {place} to {to} exceeds its memory")
            target[to : to + items] = source[place : place + items]
        elif code == BYTES_CAST:
            # A row as one opaque item is copied by one memmove, whatever its alignment.
            row = np.dtype((np.void, items))
            np.copyto(
                _window(target, to, (count, 1), target_stride, row),
                _window(source, place, (count, 1), stride, row),
            )
        else:
            names = cast_names(code)
            shape = (count, items)
            cast(
                _window(source, place, shape, stride, NUMPY_DTYPES[names[0]]),
                _window(target, to, shape, target_stride, NUMPY_DTYPES[names[1]]),
                names,
            )


def _window(
    memory: Bytes, place: int, shape: tuple[int, int], stride: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    if place < 0 or stride < 0:
        raise ValueError(f"a copy at {place} with stride {stride} exceeds its memory")
    # numpy checks that the last row ends within the buffer.
    try:
        return np.ndarray(shape, dtype, memory.data, place, (stride, dtype.itemsize))
    except TypeError as error:
        raise ValueError(f"a copy at {place} ends beyond its memory: {error}") from error
