"""Bytes of objects between arena, host segments and NVMe; never through a buffer that need not be.

Laws:

- What is stored of an object is what its extents say, and zero elsewhere: segments are recycled,
  and bytes of one tenant must not end up in another's version.
- A block that comes from NVMe is verified before its bytes get anywhere else.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event

from plexrl.statemanager.device.memory import DeviceMemory, Run
from plexrl.statemanager.fault_points import FaultPoints
from plexrl.statemanager.host.free_ranges import Piece, subrange
from plexrl.statemanager.host.pool import HostPool
from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.store.objects import StoredObject
from plexrl.statemanager.store.tiers.nvme import (
    DIGEST_BYTES,
    NvmeObjects,
    Views,
    digest,
    digests_bytes,
)
from plexrl.statemanager.store.versions.versions import padded
from plexrl.statemanager.transfer.copy.data_plane import BLOCK_BYTES, Buffer, DataPlane
from plexrl.statemanager.transfer.copy.mapped_memory import equal

Span = tuple[int, int]
"""Address and bytes."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An object's place in an arena."""

    memory: DeviceMemory
    extents: ExtentMap
    start: int
    """Of the object in the version's data."""


class Mover:
    """Moves what its caller holds in place. Thread-safe."""

    def __init__(
        self, pool: HostPool, nvme: NvmeObjects, plane: DataPlane, faults: FaultPoints
    ) -> None:
        self._pool = pool
        self._nvme = nvme
        self._plane = plane
        self._faults = faults

    def arena_to_host(self, placed: Placed, pieces: Sequence[Piece]) -> None:
        """Fill `pieces` with an object's bytes. Raises what the arena's memory does."""
        spans = self._spans(pieces)
        _clear(placed, placed.start, spans)
        self._plane.copy(_runs(placed, placed.start, spans), placed.memory.read)

    def host_to_arena(self, pieces: Sequence[Piece], placed: Placed) -> None:
        """Write an object's bytes to where they belong. Raises what the arena's memory does."""
        runs = _runs(placed, placed.start, self._spans(pieces))
        self._plane.copy(runs, placed.memory.write)

    def arena_to_nvme(self, placed: Placed, found: StoredObject) -> bytes:
        """Store an object; returns its digests. Raises as `NvmeObjects.write`, and what the arena's
        memory does."""

        @contextmanager
        def block(start: int, nbytes: int) -> Iterator[Views]:
            with self._plane.buffer() as buffer:
                self._fetch(placed, start, nbytes, buffer)
                yield [buffer.view[: padded(nbytes)]]

        return self._nvme.write(found.id, found.nbytes, block)

    def nvme_to_arena(self, found: StoredObject, placed: Placed) -> None:
        """Write an object's bytes to where they belong.

        Raises:
            CorruptStateError: a block is damaged; others may have been written.
        """
        with self._nvme.reading(found.id, found.nbytes) as reader:

            def load(start: int) -> None:
                with self._plane.buffer() as buffer:
                    count = padded(min(BLOCK_BYTES, found.nbytes - start))
                    reader.read_block(start, [buffer.view[:count]])
                    span = (buffer.address, count)
                    placed.memory.write(_runs(placed, placed.start + start, [span]))
                self._faults.reach("load.block")

            self._plane.pipeline(partial(load, start) for start in _blocks(found.nbytes))

    def host_to_nvme(self, found: StoredObject, cancelled: Event | None = None) -> bytes:
        """Store an object that lies in host; returns its digests. Raises as `NvmeObjects.write`."""
        pieces = found.pieces or ()

        @contextmanager
        def block(start: int, nbytes: int) -> Iterator[Views]:
            yield self._views(pieces, start, nbytes)

        return self._nvme.write(found.id, found.nbytes, block, cancelled)

    def nvme_to_host(
        self, found: StoredObject, pieces: Sequence[Piece], cancelled: Event | None = None
    ) -> bytes:
        """Fill `pieces` with an object that lies on NVMe; returns its digests.

        Raises:
            CorruptStateError: a block is damaged.
            OperationCancelledError: `cancelled` was set.
        """
        with self._nvme.reading(found.id, found.nbytes) as reader:

            def fetch(start: int) -> None:
                count = min(BLOCK_BYTES, found.nbytes - start)
                reader.read_block(start, self._views(pieces, start, count))
                self._faults.reach("promote.block")

            blocks = _blocks(found.nbytes)
            self._plane.pipeline((partial(fetch, start) for start in blocks), cancelled)
            return reader.digests

    def is_same(self, found: StoredObject, placed: Placed) -> bool:
        """Whether an arena holds an object's very bytes.

        Compared byte by byte with what lies in host; with what lies on NVMe only, by the digests.

        Raises:
            CorruptStateError: it is on NVMe and damaged.
        """
        if found.pieces is None:
            with self._nvme.reading(found.id, found.nbytes) as reader:
                digests = reader.digests
        else:
            digests = b""
        pieces = found.pieces or ()

        def compare(start: int) -> bool:
            nbytes = min(BLOCK_BYTES, found.nbytes - start)
            with self._plane.buffer() as buffer:
                self._fetch(placed, start, nbytes, buffer)
                if not digests:
                    return self._equals(subrange(pieces, start, nbytes), buffer)
                at = start // BLOCK_BYTES * DIGEST_BYTES
                return digest([buffer.view], nbytes) == digests[at : at + DIGEST_BYTES]

        # All of them are waited for: none may still look at the arena afterwards.
        return all(list(self._plane.spread(compare, _blocks(found.nbytes))))

    def digests(self, found: StoredObject) -> bytes:
        """An object's digests, from its header on NVMe or anew from host.

        Raises:
            CorruptStateError: it is on NVMe and damaged.
        """
        if found.digests or not found.nbytes:
            return found.digests
        if found.pieces is None:
            with self._nvme.reading(found.id, found.nbytes) as reader:
                return reader.digests
        pieces = found.pieces

        def of_block(start: int) -> bytes:
            nbytes = min(BLOCK_BYTES, found.nbytes - start)
            return digest(self._views(pieces, start, nbytes), nbytes)

        made = b"".join(self._plane.spread(of_block, _blocks(found.nbytes)))
        assert len(made) == digests_bytes(found.nbytes)
        return made

    def read(self, found: StoredObject, start: int, target: memoryview) -> None:
        """Fill `target` with an object's bytes from `start` on.

        Raises:
            CorruptStateError: they come from NVMe and are damaged.
        """
        if found.pieces is not None:
            done = 0
            for piece in subrange(found.pieces, start, len(target)):
                target[done : done + piece.nbytes] = self._pool.view(piece)
                done += piece.nbytes
            return
        with self._nvme.reading(found.id, found.nbytes) as reader, self._plane.buffer() as buffer:
            end = start + len(target)
            for at in range(start // BLOCK_BYTES * BLOCK_BYTES, end, BLOCK_BYTES):
                count = min(BLOCK_BYTES, found.nbytes - at)
                reader.read_block(at, [buffer.view[: padded(count)]])
                first, last = max(start, at), min(end, at + count)
                target[first - start : last - start] = buffer.view[first - at : last - at]

    def _fetch(self, placed: Placed, start: int, nbytes: int, buffer: Buffer) -> None:
        """Bring a block of an object from its arena to a buffer, filled up with zeros to a page."""
        spans = [(buffer.address, padded(nbytes))]
        _clear(placed, placed.start + start, spans)
        placed.memory.read(_runs(placed, placed.start + start, spans))

    def _equals(self, pieces: Iterable[Piece], buffer: Buffer) -> bool:
        at = buffer.address
        for piece in pieces:
            if not equal(self._pool.address(piece), at, piece.nbytes):
                return False
            at += piece.nbytes
        return True

    def _spans(self, pieces: Iterable[Piece]) -> list[Span]:
        return [(self._pool.address(piece), piece.nbytes) for piece in pieces]

    def _views(self, pieces: Sequence[Piece], start: int, nbytes: int) -> list[memoryview]:
        return [self._pool.view(piece) for piece in subrange(pieces, start, padded(nbytes))]


def _blocks(nbytes: int) -> range:
    return range(0, nbytes, BLOCK_BYTES)


def _runs(placed: Placed, start: int, spans: Iterable[Span]) -> list[Run]:
    """Where in the arena the bytes of `spans` belong, which hold the data from `start` on."""
    runs: list[Run] = []
    for address, nbytes in spans:
        there = address - start
        runs += [
            Run(arena_offset, there + begin, count)
            for arena_offset, begin, count in placed.extents.overlaps(start, start + nbytes)
        ]
        start += nbytes
    return runs


def _clear(placed: Placed, start: int, spans: Iterable[Span]) -> None:
    """Zero what of `spans` no extent covers."""
    for address, nbytes in spans:
        for begin, count in placed.extents.uncovered(start, start + nbytes):
            ctypes.memset(address + begin - start, 0, count)
        start += nbytes
