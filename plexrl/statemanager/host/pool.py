"""The host tier's memory: segment files on a memory file system, mapped once and kept mapped.

Fresh pages cost five to twenty times what copying into them costs, so pages that were touched once
are kept and handed out again. What is handed out is ranges of pages of any segment; as an object
may lie in several, free bytes are never too scattered to be used. (Whole segments in size classes
would waste up to half of the last one, and have to be given back to the system whenever another
class lacks.)

Laws:

- A range has one owner: it is in use, or free and touched (`warm`), or free and untouched (`cold`).
- What is in use, what is warm and what was set aside for other files never exceed the bound
  together. Cold ranges cost no memory: a segment file is sparse.
- What is written to was set aside on the file system before, which refuses where it is full; it
  would end the process otherwise, when a page cannot be had.
- A segment is one tenant's at a time, because its readers are lent a descriptor of all of it. It
  goes to another only when none of it is in use, filled with zeros, and only if it was never lent:
  a reader may have kept its descriptor, or a mapping. One that was lent is deleted instead.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from plexrl.errors import StateTierFullError
from plexrl.statemanager.host.free_ranges import FreeMemory, FreeRanges, Piece, parts, total
from plexrl.statemanager.host.numa import place_pages
from plexrl.statemanager.host.segment import SUFFIX, HostSegment
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES, populate

LOG = logging.getLogger(__name__)

SEGMENT_BYTES_MIN = 256 << 10
PREFAULT_BYTES = 64 << 20
"""Pages that are faulted in at a time, so that a close need not wait for all of them."""
PREFAULT_SEGMENTS = 8
"""At least so many segments are prefaulted, so that several tenants have something of it."""

OnMap = Callable[[int, int], None]
"""Given the address and size of a segment."""


class Pinnable(Protocol):
    """Mapped memory."""

    address: int
    nbytes: int


class HostPool:
    """Thread-safe. Sizes are rounded up to whole pages."""

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        *,
        segment_bytes_max: int = 1 << 30,
        memory_node: int | None = None,
        on_map: OnMap | None = None,
        on_unmap: OnMap | None = None,
    ) -> None:
        """Take in the segments that are there, all of them free until `claim` says otherwise;
        `remove_unclaimed` is to be called after that.

        With `on_map`, a segment's pages are all there when it is called, and stay: for memory that
        is to be pinned.
        """
        self.bytes_max = bytes_max
        self._directory = directory
        self._segment_bytes_max = segment_bytes_max
        self._memory_node = memory_node
        self._on_map, self._on_unmap = on_map, on_unmap
        self._lock = threading.Lock()
        self._faulted = threading.Condition(self._lock)
        self._faulting_bytes = 0
        self._segments: dict[int, HostSegment] = {}
        self._free: dict[str | None, FreeMemory] = {None: FreeMemory()}
        """By tenant; `None`: of segments that were nobody's yet."""
        self._numbers = 0
        """Of segments that there ever were: a number is not used again."""
        self._used_bytes = 0
        self._aside_bytes = 0
        self._files_bytes = 0
        """Of files beside the segments that are as resident as they are."""
        self._closing = threading.Event()
        self._unmapped: list[Piece] = []
        """Resident, but not mapped in this process yet."""
        self._prefaulting: threading.Thread | None = None
        self._is_prefaulting = False
        self._resident_bytes_wanted = self._ready_bytes_wanted = 0
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            self._take_in(path)
        self._is_recovering = bool(self._segments)
        """What is free may turn out to be in use."""

    @property
    def used_bytes(self) -> int:
        """In use, without what was set aside."""
        with self._lock:
            return self._used_bytes

    @property
    def aside_bytes(self) -> int:
        """Left to other files in the directory."""
        with self._lock:
            return self._aside_bytes

    @property
    def resident_bytes(self) -> int:
        """In use, or touched and free."""
        with self._lock:
            return self._used_bytes + self._warm_bytes() - self._faulting_bytes

    def claim(self, pieces: Sequence[Piece], tenant: str) -> bool:
        """Count ranges as a tenant's, and in use, that a daemon before this one handed out; False,
        and no effect, where one of them is not there, not free or another tenant's."""
        with self._lock:
            for number in {piece.segment for piece in pieces}:
                segment = self._segments.get(number)
                if segment is None or segment.owner not in (None, tenant):
                    return False
            free = FreeRanges(piece for one in self._free.values() for piece in one.warm)
            for piece in pieces:
                before = free.nbytes
                free.remove(piece)
                if before - free.nbytes != piece.nbytes:
                    return False
            for piece in pieces:
                segment = self._segments[piece.segment]
                self._give(segment, tenant)
                self._free[tenant].warm.remove(piece)
                segment.used_bytes += piece.nbytes
            self._used_bytes += total(pieces)
            return True

    def remove_unclaimed(self) -> None:
        """Delete segments that were found and that nobody claimed: whose bytes they hold is not
        known. From now on what is free is free."""
        with self._lock:
            self._is_recovering = False
            for segment in list(self._segments.values()):
                if segment.owner is None and segment.lent:
                    self._remove(segment)
            self._trim()

    def alloc(self, nbytes: int, tenant: str) -> tuple[Piece, ...]:
        """Ranges of `nbytes` bytes together, whole pages, whose contents are anything of this
        tenant's.

        Raises:
            StateTierFullError: the bound, or the file system, has no room.
        """
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            # Pages that are just being faulted in count as in use, and are free soon.
            self._faulted.wait_for(lambda: self._has_room(nbytes) or not self._faulting_bytes)
            if not self._has_room(nbytes):
                raise self._full(nbytes, "its bound is reached")
            free = self._free.setdefault(tenant, FreeMemory())
            self._take_over(nbytes - free.nbytes, tenant)
            self._grow(nbytes - free.nbytes, tenant)
            warm = free.warm.take(nbytes)
            cold = free.cold.take(nbytes - total(warm))
            self._count_used((*warm, *cold))
            # Others' pages make way for those that are new.
            self._trim()
        try:
            for piece in cold:
                self._segments[piece.segment].set_aside(piece)
        except OSError as error:
            with self._lock:
                self._free_warm(warm)
                self._free_cold(cold)
            raise self._full(nbytes, str(error)) from error
        return (*warm, *cold)

    def free(self, pieces: Iterable[Piece]) -> None:
        """Let others have these ranges; their pages stay."""
        with self._lock:
            self._free_warm(pieces)
            self._trim()

    def set_aside(self, nbytes: int) -> None:
        """Leave so much more (negative: less) of the bound to other files in the directory."""
        with self._lock:
            self._aside_bytes += nbytes
            self._trim()

    def view(self, piece: Piece) -> memoryview:
        """The memory of a range, writable."""
        return self._segments[piece.segment].view[piece.offset : piece.offset + piece.nbytes]

    def address(self, piece: Piece) -> int:
        """Where in this process a range begins."""
        return self._segments[piece.segment].address + piece.offset

    def descriptor(self, segment: int) -> int:
        """A read-only one of a segment's file; the pool's own, to be duplicated. Whoever gets it
        may keep it for good, and sees all that ever lies in the segment."""
        return self._segments[segment].lend()

    def prefault(self, nbytes: int) -> None:
        """Have `nbytes` of the bound resident soon, from a thread of its own."""
        with self._lock:
            self._resident_bytes_wanted = nbytes
            self._start_prefaulting()

    def make_ready(self, nbytes: int) -> None:
        """Have `nbytes` free and resident soon, as far as the bound allows: they will be written
        to. Pinned segments come whole, so there it has no effect."""
        with self._lock:
            self._ready_bytes_wanted = nbytes
            if self._on_map is None and self._lacking() > 0:
                self._start_prefaulting()

    def close(self) -> None:
        """Unmap everything; the files stay. No range may be touched any more."""
        self._closing.set()
        if self._prefaulting is not None:
            self._prefaulting.join()
        for segment in self._segments.values():
            self._unpin(segment)
            segment.close()

    def check(self) -> None:
        """Assert the laws, as far as they can be seen from here."""
        with self._lock:
            assert {segment.path for segment in self._segments.values()} == set(
                self._directory.glob(f"*{SUFFIX}")
            )
            in_segments: dict[int, int] = {}
            for owner, one in self._free.items():
                free = FreeRanges(one.warm)
                for piece in one.cold:
                    free.add(piece)
                for piece in free:
                    assert self._segments[piece.segment].owner == owner
                    in_segments[piece.segment] = in_segments.get(piece.segment, 0) + piece.nbytes
            for number, segment in self._segments.items():
                assert in_segments.get(number, 0) + segment.used_bytes == segment.nbytes
            assert self._used_bytes == sum(s.used_bytes for s in self._segments.values())
            warm = self._warm_bytes()
            assert not warm or self._used_bytes + warm + self._aside_bytes <= self.bytes_max

    def _take_in(self, path: Path) -> None:
        """Map a segment that is there already, and count its touched pages as warm."""
        number = int(path.name.removesuffix(SUFFIX))
        self._numbers = max(self._numbers, number + 1)
        if path.stat().st_size < PAGE_BYTES:
            path.unlink()
            return
        segment = HostSegment(self._directory, number)
        self._segments[number] = segment
        place_pages(segment.address, segment.nbytes, node=self._memory_node)
        free = self._free[None]
        cold = FreeRanges([segment.whole])
        for piece in segment.touched():
            free.warm.add(piece)
            self._unmapped.append(piece)
            cold.remove(piece)
        for piece in cold:
            if self._on_map is None:
                free.cold.add(piece)
            else:
                segment.set_aside(piece)
                free.warm.add(piece)
        self._pin(segment)

    # The following hold `_lock` already.

    def _has_room(self, nbytes: int) -> bool:
        return self._used_bytes + self._aside_bytes + nbytes <= self.bytes_max

    def _start_prefaulting(self) -> None:
        if not self._is_prefaulting and not self._closing.is_set():
            self._is_prefaulting = True
            self._prefaulting = threading.Thread(target=self._prefault, daemon=True)
            self._prefaulting.start()

    def _lacking(self) -> int:
        """Bytes to fault in next."""
        warm = self._warm_bytes()
        wanted = max(self._resident_bytes_wanted - self._used_bytes, self._ready_bytes_wanted)
        room = self.bytes_max - self._used_bytes - warm - self._aside_bytes
        return min(wanted - warm, room, PREFAULT_BYTES) // PAGE_BYTES * PAGE_BYTES

    def _warm_bytes(self) -> int:
        return sum(one.warm.nbytes for one in self._free.values())

    def _count_used(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._segments[piece.segment].used_bytes += piece.nbytes
            self._used_bytes += piece.nbytes

    def _count_unused(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._segments[piece.segment].used_bytes -= piece.nbytes
            self._used_bytes -= piece.nbytes

    def _free_warm(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._count_unused([piece])
            self._free[self._segments[piece.segment].owner].warm.add(piece)

    def _free_cold(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._count_unused([piece])
            self._make_cold(piece)

    def _give(self, segment: HostSegment, tenant: str) -> None:
        """Let a segment's free ranges be a tenant's."""
        if segment.owner == tenant:
            return
        former = self._free[segment.owner]
        free = self._free.setdefault(tenant, FreeMemory())
        for source, target in ((former.warm, free.warm), (former.cold, free.cold)):
            for piece in [piece for piece in source if piece.segment == segment.number]:
                source.remove(piece)
                target.add(piece)
        segment.owner = tenant

    def _take_over(self, nbytes: int, tenant: str) -> None:
        """Have segments that are nobody's, or of which nobody uses anything, be a tenant's, up to
        so many bytes."""
        others = [s for s in self._segments.values() if s.owner != tenant and not s.used_bytes]
        # Nobody's first; then what was idle as it is, the smallest that do.
        others.sort(key=lambda s: (s.owner is not None, s.nbytes < nbytes, s.nbytes, s.number))
        for segment in others:
            if nbytes <= 0:
                return
            if segment.lent:
                continue
            if segment.owner is not None:
                for piece in self._free[segment.owner].warm:
                    if piece.segment == segment.number:
                        segment.clear(piece)
            self._give(segment, tenant)
            nbytes -= segment.nbytes

    def _grow(self, nbytes: int, tenant: str | None, segment_bytes: int = 0) -> None:
        """Add segments until a tenant has so many bytes more; `segment_bytes` absent: in files of
        what size is thought fit."""
        while nbytes > 0:
            total = sum(segment.nbytes for segment in self._segments.values()) + self._files_bytes
            own = sum(s.nbytes for s in self._segments.values() if s.owner == tenant)
            # As much again as there is, so that many small versions do not make many small files.
            wanted = segment_bytes or max(nbytes, own, SEGMENT_BYTES_MIN)
            size = min(1 << (wanted - 1).bit_length(), self._segment_bytes_max)
            least = min(nbytes, self._segment_bytes_max)
            if tenant is not None:
                total -= self._make_way(total + size - self.bytes_max, tenant)
            room = (self.bytes_max - total) // PAGE_BYTES * PAGE_BYTES
            if self._on_map is not None and least > room:
                raise self._full(nbytes, "segments of other tenants are partly in use")
            size = max(min(size, room), least)
            try:
                self._create(size, tenant)
            except OSError as error:
                raise self._full(nbytes, str(error)) from error
            nbytes -= size

    def _make_way(self, nbytes: int, tenant: str) -> int:
        """Delete others' segments of which nothing is in use, up to so many bytes; returns how many
        they were."""
        removed = 0
        for segment in list(self._segments.values()):
            if removed >= nbytes:
                break
            if segment.owner not in (None, tenant) and not segment.used_bytes:
                self._remove(segment)
                removed += segment.nbytes
        return removed

    def _create(self, nbytes: int, tenant: str | None) -> None:
        segment = HostSegment(self._directory, self._numbers, nbytes)
        segment.owner = tenant
        try:
            if self._on_map is not None:
                segment.set_aside(segment.whole)
        except OSError:
            segment.remove()
            raise
        self._numbers += 1
        self._segments[segment.number] = segment
        place_pages(segment.address, nbytes, node=self._memory_node)
        free = self._free[tenant]
        (free.cold if self._on_map is None else free.warm).add(segment.whole)
        self._pin(segment)

    def _remove(self, segment: HostSegment) -> None:
        """Delete a segment of which nothing is in use."""
        assert not segment.used_bytes
        free = self._free[segment.owner]
        for ranges in (free.warm, free.cold):
            ranges.remove(segment.whole)
        del self._segments[segment.number]
        self._unpin(segment)
        segment.remove()

    def _pin(self, segment: Pinnable) -> None:
        if self._on_map is not None:
            self._on_map(segment.address, segment.nbytes)

    def _unpin(self, segment: Pinnable) -> None:
        if self._on_unmap is not None:
            self._on_unmap(segment.address, segment.nbytes)

    def _trim(self) -> None:
        """Give warm pages back as far as the bound asks for it; pinned ones cannot be."""
        if self._on_map is not None or self._is_recovering:
            return
        excess = self._used_bytes + self._warm_bytes() + self._aside_bytes - self.bytes_max
        while excess > 0:
            free = max(self._free.values(), key=lambda one: one.warm.nbytes)
            taken = free.warm.take(-(-excess // PAGE_BYTES) * PAGE_BYTES)
            if not taken:
                return
            for piece in taken:
                self._make_cold(piece)
                excess -= piece.nbytes

    def _make_cold(self, piece: Piece) -> None:
        segment = self._segments[piece.segment]
        segment.discard(piece)
        self._free[segment.owner].cold.add(piece)

    def _full(self, nbytes: int, why: str) -> StateTierFullError:
        return StateTierFullError(
            f"the host tier {self._directory} has no room on its file system for {nbytes} bytes "
            f"({why}): free space there or lower the tier's bound; the state stays where it was",
            tier="host",
        )

    # These hold no lock.

    def _prefault(self) -> None:
        # What lies here from before is resident, but not mapped yet.
        with self._lock:
            resident, self._unmapped = self._unmapped, []
        for piece in resident:
            self._map_resident(piece)
        try:
            while not self._closing.is_set():
                cold = self._cold_to_fault()
                if not cold:
                    return
                is_touched = False
                try:
                    for piece in cold:
                        self._fault_in(piece)
                    is_touched = True
                finally:
                    with self._lock:
                        (self._free_warm if is_touched else self._free_cold)(cold)
                        self._trim()
                        self._faulting_bytes = 0
                        self._faulted.notify_all()
        except (OSError, StateTierFullError) as error:
            LOG.warning("the host tier is not wholly prefaulted: %s", error)
            with self._lock:
                self._is_prefaulting = False

    def _cold_to_fault(self) -> list[Piece]:
        """What to fault in next. It counts as in use for as long as it takes, so that the bound
        holds."""
        with self._lock:
            lacking = self._lacking()
            if lacking <= 0:
                self._is_prefaulting = False
                return []
            wanted = -(-self._resident_bytes_wanted // PREFAULT_SEGMENTS)
            segment_bytes = max(SEGMENT_BYTES_MIN, wanted or lacking)
            if not any(one.cold.nbytes for one in self._free.values()):
                self._grow(min(lacking, segment_bytes), None, segment_bytes)
            # Nobody's first, since anybody may have it.
            owners = sorted(self._free.values(), key=lambda one: one is not self._free[None])
            cold = next(one for one in owners if one.cold.nbytes).cold.take(lacking)
            self._count_used(cold)
            self._faulting_bytes = total(cold)
            return cold

    def _map_resident(self, piece: Piece) -> None:
        for part in parts(piece, PREFAULT_BYTES):
            with self._lock:
                # Under the lock: nothing keeps a segment of which nothing is in use.
                if self._closing.is_set() or part.segment not in self._segments:
                    return
                populate(self.address(part), part.nbytes)

    def _fault_in(self, piece: Piece) -> None:
        for part in parts(piece, PREFAULT_BYTES):
            if self._closing.is_set():
                return
            self._segments[part.segment].set_aside(part)
