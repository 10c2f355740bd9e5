"""Moves of objects' bytes between arenas, host segments and NVMe, without needless buffers.

Invariants:

- A stored object contains the bytes of its extents, and zeros elsewhere: segments are recycled, and
  one tenant's bytes must not enter another's version.
- A block from NVMe is verified before its bytes are copied further.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event

from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES, DataPlane, StagingBuffer
from plexrl.statemanager.bytes.mapped_memory import equal
from plexrl.statemanager.device.memory import ByteRun, WritableDevice
from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.layout.ranges import Piece, subrange
from plexrl.statemanager.layout.versions import padded
from plexrl.statemanager.store.objects import SharedObject
from plexrl.statemanager.store.tiers.fault_points import FaultPoints
from plexrl.statemanager.store.tiers.host.pool import HostPool
from plexrl.statemanager.store.tiers.nvme import (
    DIGEST_BYTES,
    NvmeObjects,
    Views,
    digest,
    digests_bytes,
)

Span = tuple[int, int]
"""Address and bytes."""


@dataclass(frozen=True, slots=True)
class ObjectPlacement:
    """Position of an object in an arena."""

    memory: WritableDevice
    extents: ExtentMap
    start: int
    """Offset of the object in the version's data."""


class Mover:
    """Moves objects that its caller pins. Thread-safe."""

    def __init__(
        self, pool: HostPool, nvme: NvmeObjects, plane: DataPlane, faults: FaultPoints
    ) -> None:
        self._pool = pool
        self._nvme = nvme
        self._plane = plane
        self._faults = faults

    def arena_to_host(self, placement: ObjectPlacement, pieces: Sequence[Piece]) -> None:
        """Fill `pieces` with an object's bytes. Raises as the arena's memory."""
        spans = self._spans(pieces)
        _clear(placement, placement.start, spans)
        self._plane.copy(_runs(placement, placement.start, spans), placement.memory.read)

    def host_to_arena(self, pieces: Sequence[Piece], placement: ObjectPlacement) -> None:
        """Write an object's bytes to the arena. Raises as the arena's memory."""
        runs = _runs(placement, placement.start, self._spans(pieces))
        self._plane.copy(runs, placement.memory.write)

    def arena_to_nvme(self, placement: ObjectPlacement, found: SharedObject) -> bytes:
        """Store an object; returns its checksums. Raises as `NvmeObjects.write` and the arena's
        memory."""

        @contextmanager
        def block(start: int, nbytes: int) -> Iterator[Views]:
            with self._plane.buffer() as buffer:
                self._fetch(placement, start, nbytes, buffer)
                yield [buffer.view[: padded(nbytes)]]

        return self._nvme.write(found.id, found.nbytes, block)

    def nvme_to_arena(self, found: SharedObject, placement: ObjectPlacement) -> None:
        """Write an object's bytes to the arena.

        Raises:
            CorruptStateError: a block is damaged; others may have been written.
        """
        with self._nvme.reading(found.id, found.nbytes) as reader:

            def load(start: int) -> None:
                with self._plane.buffer() as buffer:
                    count = padded(min(BLOCK_BYTES, found.nbytes - start))
                    reader.read_block(start, [buffer.view[:count]])
                    span = (buffer.address, count)
                    placement.memory.write(_runs(placement, placement.start + start, [span]))
                self._faults.reach("load.block")

            self._plane.pipeline(partial(load, start) for start in _blocks(found.nbytes))

    def host_to_nvme(self, found: SharedObject, cancelled: Event | None = None) -> bytes:
        """Store a host object on NVMe; returns its checksums. Raises as `NvmeObjects.write`."""
        pieces = found.pieces or ()

        @contextmanager
        def block(start: int, nbytes: int) -> Iterator[Views]:
            yield self._views(pieces, start, nbytes)

        return self._nvme.write(found.id, found.nbytes, block, cancelled)

    def nvme_to_host(
        self, found: SharedObject, pieces: Sequence[Piece], cancelled: Event | None = None
    ) -> bytes:
        """Fill `pieces` with an object on NVMe; returns its checksums.

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

    def is_same(self, found: SharedObject, placement: ObjectPlacement) -> bool:
        """Whether an arena holds the same bytes as an object.

        The bytes are compared with the host tier, or the checksums if the object is only on NVMe.

        Raises:
            CorruptStateError: the object is on NVMe and damaged.
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
                self._fetch(placement, start, nbytes, buffer)
                if not digests:
                    return self._equals(subrange(pieces, start, nbytes), buffer)
                at = start // BLOCK_BYTES * DIGEST_BYTES
                return digest([buffer.view], nbytes) == digests[at : at + DIGEST_BYTES]

        return all(self._plane.spread(compare, _blocks(found.nbytes)))

    def digests(self, found: SharedObject) -> bytes:
        """An object's checksums, from its header on NVMe or computed from the host tier.

        Raises:
            CorruptStateError: the object is on NVMe and damaged.
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

    def read(self, found: SharedObject, start: int, target: memoryview) -> None:
        """Fill `target` with an object's bytes from offset `start` on.

        Raises:
            CorruptStateError: the bytes are on NVMe and damaged.
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

    def _fetch(
        self, placement: ObjectPlacement, start: int, nbytes: int, buffer: StagingBuffer
    ) -> None:
        """Copy a block of an object from its arena to a buffer, padded with zeros to a page."""
        spans = [(buffer.address, padded(nbytes))]
        _clear(placement, placement.start + start, spans)
        placement.memory.read(_runs(placement, placement.start + start, spans))

    def _equals(self, pieces: Iterable[Piece], buffer: StagingBuffer) -> bool:
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


def _runs(placement: ObjectPlacement, start: int, spans: Iterable[Span]) -> list[ByteRun]:
    """Copies between the arena and `spans`, which hold the data from offset `start` on."""
    runs: list[ByteRun] = []
    for address, nbytes in spans:
        base = address - start
        runs += [
            ByteRun(arena_offset, base + begin, count)
            for arena_offset, begin, count in placement.extents.overlaps(start, start + nbytes)
        ]
        start += nbytes
    return runs


def _clear(placement: ObjectPlacement, start: int, spans: Iterable[Span]) -> None:
    """Zero the parts of `spans` that no extent covers."""
    for address, nbytes in spans:
        for begin, count in placement.extents.uncovered(start, start + nbytes):
            ctypes.memset(address + begin - start, 0, count)
        start += nbytes
