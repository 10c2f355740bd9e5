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

import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from plexrl.errors import StateTierFullError
from plexrl.statemanager.bytes.data_plane import OnMap
from plexrl.statemanager.layout.ranges import (
    PAGE_BYTES,
    FreeMemory,
    FreeRanges,
    Piece,
    total_bytes,
)
from plexrl.statemanager.store.tiers.host.segment import SUFFIX, HostSegment

SEGMENT_BYTES_MIN = 256 << 10


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
        self._segments: dict[int, HostSegment] = {}
        self._free: dict[str | None, FreeMemory] = {None: FreeMemory()}
        """Free memory by tenant; `None`: of segments without a tenant."""
        self._numbers = 0
        """Next segment number; numbers are not reused."""
        self._used_bytes = 0
        self._other_bytes = 0
        self._files_bytes = 0
        """Bytes of worker files, which are resident like segments."""
        self._making_bytes = 0
        """Bytes of a segment that is being made without the lock."""
        self._unmapped: list[Piece] = []
        """Resident ranges that this process has not mapped yet."""
        self._unpinned: list[Pinnable] = []
        """Recovered memory that is to be pinned."""
        self._rank_nodes: dict[tuple[str, int], int] = {}
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
            return self._used_bytes + self._warm_bytes()

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

    def alloc(self, nbytes: int, tenant: str, near: int | None = None) -> tuple[Piece, ...]:
        """Allocate ranges of `nbytes` together, if possible on the memory node `near`. They may
        contain old data of the same tenant.

        Raises:
            StateTierFullError: the capacity is reached or the file system is full.
        """
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            self._await_space(nbytes, tenant)
            if not self._fits(nbytes):
                raise self._full(nbytes, "its capacity is reached")
            free = self._free.setdefault(tenant, FreeMemory())
            if near is not None:
                self._reassign(nbytes - free.bytes_in(self._on_node(near)), tenant, near)
            self._reassign(nbytes - free.nbytes, tenant)
            self._grow(nbytes - free.nbytes, tenant, self._nodes_near(near))
            preferred = self._on_node(near)
            warm = free.warm.take(nbytes, preferred)
            cold = free.cold.take(nbytes - total_bytes(warm), preferred)
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

    def place_rank(self, shard: tuple[str, int], node: int | None) -> None:
        """Remember the memory node of a rank's GPU, by deployment and rank; None: unknown."""
        if node is None:
            self._rank_nodes.pop(shard, None)
        else:
            self._rank_nodes[shard] = node

    def forget_ranks(self, deployment: str) -> None:
        """Forget where a deployment's ranks are."""
        for shard in [shard for shard in list(self._rank_nodes) if shard[0] == deployment]:
            self._rank_nodes.pop(shard, None)

    def node_of(self, shard: tuple[str, int]) -> int | None:
        """The memory node near which a rank's memory is allocated; None: any."""
        return self._rank_nodes.get(shard)

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

    def close(self) -> None:
        """Unmap everything; the files stay. No range may be accessed any more."""
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
        segment = HostSegment(self._directory, number, memory_nodes=self._memory_nodes)
        self._segments[number] = segment
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
        if self._on_map is not None:
            self._unpinned.append(segment)

    # The caller holds `_lock` in the following methods.

    def _fits(self, nbytes: int) -> bool:
        return self._used_bytes + self._other_bytes + self._making_bytes + nbytes <= self.bytes_max

    def _await_space(self, nbytes: int, tenant: str | None) -> None:
        """Wait while background work holds space that a tenant's allocation (None: a file) needs;
        here there is none."""

    def _on_node(self, node: int | None) -> frozenset[int]:
        """Numbers of the segments on a memory node."""
        if node is None:
            return frozenset()
        return frozenset(s.number for s in self._segments.values() if s.node == node)

    def _nodes_near(self, near: int | None) -> tuple[int, ...]:
        """Memory nodes of new memory: the node `near`, or all of the pool's."""
        return (near,) if near is not None and near in self._memory_nodes else self._memory_nodes

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

    def _reassign(self, nbytes: int, tenant: str, near: int | None = None) -> None:
        """Assign unused segments, of `nbytes` together, to a tenant. `near`: only segments of that
        memory node; None: any."""
        others = [
            segment
            for segment in self._segments.values()
            if segment.owner != tenant and not segment.used_bytes and near in (None, segment.node)
        ]
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

    def _grow(
        self,
        nbytes: int,
        tenant: str | None,
        memory_nodes: Sequence[int],
        segment_bytes: int = 0,
    ) -> None:
        """Create segments for `nbytes` more of a tenant, on memory nodes; `segment_bytes` 0: choose
        their size."""
        while nbytes > 0:
            total = self._mapped_bytes()
            own = sum(s.nbytes for s in self._segments.values() if s.owner == tenant)
            # Doubling avoids many small files for many small versions.
            wanted = segment_bytes or max(nbytes, own, SEGMENT_BYTES_MIN)
            size = min(1 << (wanted - 1).bit_length(), self._segment_bytes_max)
            least = min(nbytes, self._segment_bytes_max)
            if tenant is not None:
                total -= self._remove_idle_segments(total + size - self.bytes_max, (tenant,))
            free = (self.bytes_max - total) // PAGE_BYTES * PAGE_BYTES
            if self._on_map is not None and least > free:
                free += self._remove_idle_files(least - free)
            if self._on_map is not None and least > free:
                raise self._full(nbytes, "segments of other tenants are partly in use")
            size = max(min(size, free), least)
            try:
                self._create(size, tenant, memory_nodes)
            except OSError as error:
                raise self._full(nbytes, str(error)) from error
            nbytes -= size

    def _mapped_bytes(self) -> int:
        """Size of all segments and files."""
        sizes = [segment.nbytes for segment in self._segments.values()]
        return sum(sizes) + self._files_bytes + self._making_bytes

    def _remove_idle_segments(self, nbytes: int, kept: Collection[str]) -> int:
        """Delete unused segments, but those of the tenants `kept`, until `nbytes` are freed;
        returns the bytes freed."""
        removed = 0
        idle = [s for s in self._segments.values() if s.owner not in kept and not s.used_bytes]
        for segment in sorted(idle, key=lambda s: (s.owner is not None, s.number)):
            if removed >= nbytes:
                break
            self._remove(segment)
            removed += segment.nbytes
        return removed

    def _remove_idle_files(self, nbytes: int) -> int:  # noqa: ARG002
        """Delete unused files until `nbytes` are freed; returns the bytes freed. Here there are
        none."""
        return 0

    def _create(self, nbytes: int, tenant: str | None, memory_nodes: Sequence[int]) -> None:
        segment = HostSegment(self._directory, self._numbers, nbytes, memory_nodes=memory_nodes)
        segment.owner = tenant
        try:
            if self._on_map is not None:
                segment.fallocate(segment.whole)
        except OSError:
            segment.remove()
            raise
        self._numbers += 1
        self._pin(segment)
        self._add(segment)

    def _add(self, segment: HostSegment) -> None:
        """Add a segment, all of it free."""
        self._segments[segment.number] = segment
        free = self._free[segment.owner]
        (free.cold if self._on_map is None else free.warm).add(segment.whole)

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
        if segment in self._unpinned:
            self._unpinned.remove(segment)
        elif self._on_unmap is not None:
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
