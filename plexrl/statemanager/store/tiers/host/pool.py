"""The host tier's memory pool: segment files on a memory file system, which stay mapped.

The first use of a page costs five to twenty times as much as a copy into it, so touched pages are
kept and reused. The pool allocates page ranges of any segments. An object may span several ranges,
so fragmentation never prevents an allocation. (The alternative, whole segments in size classes,
would waste up to half of the last segment and move memory between classes through the system.)

Invariants:

- A range is in use, free with pages (`warm`), or free without pages (`cold`).
- Ranges in use, warm ranges and the bytes reserved for other files never exceed the capacity
  together. Cold ranges use no memory, because segment files are sparse.
- Memory is allocated on the file system before it is written. A full file system then reports an
  error; a write without this would kill the process (SIGBUS).
- A segment belongs to one tenant at a time, because its readers get a descriptor of the whole file.
  It is reassigned only if none of it is in use and its descriptor was never shared, after it is
  cleared. A shared segment is deleted instead, since a reader may have kept the descriptor.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from plexrl.errors import StateTierFullError
from plexrl.statemanager.store.tiers.host.free_ranges import (
    FreeMemory,
    FreeRanges,
    Piece,
    chunks,
    total_bytes,
)
from plexrl.statemanager.store.tiers.host.numa import set_memory_policy
from plexrl.statemanager.store.tiers.host.segment import SUFFIX, HostSegment
from plexrl.statemanager.transfer.copy.data_plane import OnMap
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES, populate

LOG = logging.getLogger(__name__)

SEGMENT_BYTES_MIN = 256 << 10
PREFAULT_BYTES = 64 << 20
"""Bytes to prefault at a time, so that `close` does not wait for all of them."""
PREFAULT_SEGMENTS = 8
"""Minimum number of prefaulted segments, so that several tenants can use them."""


class Pinnable(Protocol):
    """Mapped memory that may be pinned."""

    address: int
    nbytes: int


class HostPool:
    """Allocates page ranges. Thread-safe. Sizes are rounded up to whole pages."""

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        *,
        segment_bytes_max: int = 1 << 30,
        memory_nodes: Sequence[int] = (),
        on_map: OnMap | None = None,
        on_unmap: OnMap | None = None,
    ) -> None:
        """Map the existing segments, all free; then call `claim` for ranges in use, and
        `remove_unclaimed` once.

        With `on_map`, all pages of a segment are allocated before the call, and stay, so that the
        memory can be pinned. `memory_nodes`: NUMA nodes of the memory; none: all.
        """
        self.bytes_max = bytes_max
        self._directory = directory
        self._segment_bytes_max = segment_bytes_max
        self._memory_nodes = tuple(memory_nodes)
        self._on_map, self._on_unmap = on_map, on_unmap
        self._lock = threading.Lock()
        self._faulted = threading.Condition(self._lock)
        self._faulting_bytes = 0
        self._segments: dict[int, HostSegment] = {}
        self._free: dict[str | None, FreeMemory] = {None: FreeMemory()}
        """Free memory by tenant; `None`: of segments without a tenant."""
        self._numbers = 0
        """Next segment number; numbers are not reused."""
        self._used_bytes = 0
        self._other_bytes = 0
        self._files_bytes = 0
        """Bytes of worker files, which are resident like segments."""
        self._closing = threading.Event()
        self._unmapped: list[Piece] = []
        """Resident ranges that this process has not mapped yet."""
        self._prefaulting: threading.Thread | None = None
        self._is_prefaulting = False
        self._resident_bytes_wanted = self._free_bytes_wanted = 0
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            self._recover(path)
        self._is_recovering = bool(self._segments)
        """True until `remove_unclaimed`: a range that counts as free may still be claimed."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use, without other files."""
        with self._lock:
            return self._used_bytes

    @property
    def other_bytes(self) -> int:
        """Bytes of the capacity that other files in the directory use."""
        with self._lock:
            return self._other_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes in use or warm."""
        with self._lock:
            return self._used_bytes + self._warm_bytes() - self._faulting_bytes

    def claim(self, pieces: Sequence[Piece], tenant: str) -> bool:
        """Mark a tenant's ranges from a previous daemon as in use. Returns False, without effect,
        if a range is missing, in use or another tenant's."""
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
                self._assign(segment, tenant)
                self._free[tenant].warm.remove(piece)
                segment.used_bytes += piece.nbytes
            self._used_bytes += total_bytes(pieces)
            return True

    def remove_unclaimed(self) -> None:
        """End recovery: delete unclaimed segments, whose tenants are unknown."""
        with self._lock:
            self._is_recovering = False
            for segment in list(self._segments.values()):
                if segment.owner is None and segment.shared:
                    self._remove(segment)
            self._trim()

    def alloc(self, nbytes: int, tenant: str) -> tuple[Piece, ...]:
        """Allocate ranges of `nbytes` together. They may contain old data of the same tenant.

        Raises:
            StateTierFullError: the capacity is reached or the file system is full.
        """
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            # Ranges that are being prefaulted count as in use, and become free soon.
            self._faulted.wait_for(lambda: self._fits(nbytes) or not self._faulting_bytes)
            if not self._fits(nbytes):
                raise self._full(nbytes, "its capacity is reached")
            free = self._free.setdefault(tenant, FreeMemory())
            self._reassign(nbytes - free.nbytes, tenant)
            self._grow(nbytes - free.nbytes, tenant)
            warm = free.warm.take(nbytes)
            cold = free.cold.take(nbytes - total_bytes(warm))
            self._count_used((*warm, *cold))
            # Make room for the new pages: return other free pages to the system.
            self._trim()
        try:
            for piece in cold:
                self._segments[piece.segment].fallocate(piece)
        except OSError as error:
            with self._lock:
                self._free_warm(warm)
                self._free_cold(cold)
            raise self._full(nbytes, str(error)) from error
        return (*warm, *cold)

    def free(self, pieces: Iterable[Piece]) -> None:
        """Free ranges; their pages stay."""
        with self._lock:
            self._free_warm(pieces)
            self._trim()

    def reserve_other(self, nbytes: int) -> None:
        """Reserve more (negative: less) of the capacity for other files in the directory."""
        with self._lock:
            self._other_bytes += nbytes
            self._trim()

    def view(self, piece: Piece) -> memoryview:
        """Writable memory of a range."""
        return self._segments[piece.segment].view[piece.offset : piece.offset + piece.nbytes]

    def address(self, piece: Piece) -> int:
        """Address of a range in this process."""
        return self._segments[piece.segment].address + piece.offset

    def descriptor(self, segment: int) -> int:
        """A segment's read-only descriptor, owned by the pool; the caller duplicates it. A process
        that gets it may keep it, and can read the segment's later contents."""
        return self._segments[segment].share_descriptor()

    def prefault(self, nbytes: int) -> None:
        """Prefault `nbytes` of the capacity, on a thread."""
        with self._lock:
            self._resident_bytes_wanted = nbytes
            self._start_prefaulting()

    def prefault_free(self, nbytes: int) -> None:
        """Prefault up to `nbytes` of free memory, which will be written soon. No effect on pinned
        segments, which are always resident."""
        with self._lock:
            self._free_bytes_wanted = nbytes
            if self._on_map is None and self._bytes_to_prefault() > 0:
                self._start_prefaulting()

    def close(self) -> None:
        """Unmap everything; the files stay. No range may be accessed any more."""
        self._closing.set()
        if self._prefaulting is not None:
            self._prefaulting.join()
        for segment in self._segments.values():
            self._unpin(segment)
            segment.close()

    def check(self) -> None:
        """Assert the invariants."""
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
            assert not warm or self._used_bytes + warm + self._other_bytes <= self.bytes_max

    def _recover(self, path: Path) -> None:
        """Map an existing segment; its touched pages are warm."""
        number = int(path.name.removesuffix(SUFFIX))
        self._numbers = max(self._numbers, number + 1)
        if path.stat().st_size < PAGE_BYTES:
            path.unlink()
            return
        segment = HostSegment(self._directory, number)
        self._segments[number] = segment
        set_memory_policy(segment.address, segment.nbytes, preferred=self._memory_nodes)
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
                segment.fallocate(piece)
                free.warm.add(piece)
        self._pin(segment)

    # The caller holds `_lock` in the following methods.

    def _fits(self, nbytes: int) -> bool:
        return self._used_bytes + self._other_bytes + nbytes <= self.bytes_max

    def _start_prefaulting(self) -> None:
        if not self._is_prefaulting and not self._closing.is_set():
            self._is_prefaulting = True
            self._prefaulting = threading.Thread(target=self._prefault, daemon=True)
            self._prefaulting.start()

    def _bytes_to_prefault(self) -> int:
        """Bytes to prefault next."""
        warm = self._warm_bytes()
        wanted = max(self._resident_bytes_wanted - self._used_bytes, self._free_bytes_wanted)
        free = self.bytes_max - self._used_bytes - warm - self._other_bytes
        return min(wanted - warm, free, PREFAULT_BYTES) // PAGE_BYTES * PAGE_BYTES

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

    def _assign(self, segment: HostSegment, tenant: str) -> None:
        """Assign a segment and its free ranges to a tenant."""
        if segment.owner == tenant:
            return
        previous = self._free[segment.owner]
        free = self._free.setdefault(tenant, FreeMemory())
        for source, target in ((previous.warm, free.warm), (previous.cold, free.cold)):
            for piece in [piece for piece in source if piece.segment == segment.number]:
                source.remove(piece)
                target.add(piece)
        segment.owner = tenant

    def _reassign(self, nbytes: int, tenant: str) -> None:
        """Assign unused segments, of `nbytes` together, to a tenant."""
        others = [s for s in self._segments.values() if s.owner != tenant and not s.used_bytes]
        # Unassigned segments first, then the smallest idle segment that suffices.
        others.sort(key=lambda s: (s.owner is not None, s.nbytes < nbytes, s.nbytes, s.number))
        for segment in others:
            if nbytes <= 0:
                return
            if segment.shared:
                continue
            if segment.owner is not None:
                for piece in self._free[segment.owner].warm:
                    if piece.segment == segment.number:
                        segment.clear(piece)
            self._assign(segment, tenant)
            nbytes -= segment.nbytes

    def _grow(self, nbytes: int, tenant: str | None, segment_bytes: int = 0) -> None:
        """Create segments for `nbytes` more of a tenant; `segment_bytes` 0: choose their size."""
        while nbytes > 0:
            total = sum(segment.nbytes for segment in self._segments.values()) + self._files_bytes
            own = sum(s.nbytes for s in self._segments.values() if s.owner == tenant)
            # Doubling avoids many small files for many small versions.
            wanted = segment_bytes or max(nbytes, own, SEGMENT_BYTES_MIN)
            size = min(1 << (wanted - 1).bit_length(), self._segment_bytes_max)
            least = min(nbytes, self._segment_bytes_max)
            if tenant is not None:
                total -= self._remove_idle_segments(total + size - self.bytes_max, tenant)
            free = (self.bytes_max - total) // PAGE_BYTES * PAGE_BYTES
            if self._on_map is not None and least > free:
                raise self._full(nbytes, "segments of other tenants are partly in use")
            size = max(min(size, free), least)
            try:
                self._create(size, tenant)
            except OSError as error:
                raise self._full(nbytes, str(error)) from error
            nbytes -= size

    def _remove_idle_segments(self, nbytes: int, tenant: str) -> int:
        """Delete unused segments of other tenants until `nbytes` are freed; returns the bytes
        freed."""
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
        # Before its pages are allocated, which then lie where they should.
        set_memory_policy(segment.address, nbytes, preferred=self._memory_nodes)
        try:
            if self._on_map is not None:
                segment.fallocate(segment.whole)
        except OSError:
            segment.remove()
            raise
        self._numbers += 1
        self._segments[segment.number] = segment
        free = self._free[tenant]
        (free.cold if self._on_map is None else free.warm).add(segment.whole)
        self._pin(segment)

    def _remove(self, segment: HostSegment) -> None:
        """Delete an unused segment."""
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
        """Return warm pages to the system while the capacity is exceeded; pinned pages stay."""
        if self._on_map is not None or self._is_recovering:
            return
        excess = self._used_bytes + self._warm_bytes() + self._other_bytes - self.bytes_max
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
            f"the host tier {self._directory} has no space for {nbytes} bytes "
            f"({why}): free space there or lower the tier's capacity; the state stays where it was",
            tier="host",
        )

    # The caller holds no lock in the following methods.

    def _prefault(self) -> None:
        # Ranges of a previous daemon are resident, but not mapped yet.
        with self._lock:
            resident, self._unmapped = self._unmapped, []
        for piece in resident:
            self._map_resident(piece)
        try:
            while not self._closing.is_set():
                cold = self._next_cold_pieces()
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
            LOG.warning("the host tier is not completely prefaulted: %s", error)
            with self._lock:
                self._is_prefaulting = False

    def _next_cold_pieces(self) -> list[Piece]:
        """Cold ranges to prefault next. They count as in use meanwhile, so that the capacity is
        respected."""
        with self._lock:
            nbytes = self._bytes_to_prefault()
            if nbytes <= 0:
                self._is_prefaulting = False
                return []
            wanted = -(-self._resident_bytes_wanted // PREFAULT_SEGMENTS)
            segment_bytes = max(SEGMENT_BYTES_MIN, wanted or nbytes)
            if not any(one.cold.nbytes for one in self._free.values()):
                self._grow(min(nbytes, segment_bytes), None, segment_bytes)
            # Unassigned segments first, because any tenant may use them.
            owners = sorted(self._free.values(), key=lambda one: one is not self._free[None])
            cold = next(one for one in owners if one.cold.nbytes).cold.take(nbytes)
            self._count_used(cold)
            self._faulting_bytes = total_bytes(cold)
            return cold

    def _map_resident(self, piece: Piece) -> None:
        for chunk in chunks(piece, PREFAULT_BYTES):
            with self._lock:
                # Under the lock, because an unused segment can be deleted at any time.
                if self._closing.is_set() or chunk.segment not in self._segments:
                    return
                populate(self.address(chunk), chunk.nbytes)

    def _fault_in(self, piece: Piece) -> None:
        for chunk in chunks(piece, PREFAULT_BYTES):
            if self._closing.is_set():
                return
            self._segments[chunk.segment].fallocate(chunk)
