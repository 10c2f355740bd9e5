"""Host-tier memory that workers allocate, to update state in place that stays in host memory.

Invariants:

- An allocation counts against the tier's capacity and its tenant's quota until it is freed or a
  version takes it over.
- A version takes an allocation over, without a copy, only after OFD locks show that no process can
  write to it. So a stored version never changes.
- The daemon reads or writes allocated memory only while no process can write to it or truncate it.
- Released memory is not allocated again while a process still has it open or mapped.
"""

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from plexrl.errors import ConflictError, CorruptStateError
from plexrl.statemanager.device.mapping import move
from plexrl.statemanager.device.memory import ByteRun, WritableDevice
from plexrl.statemanager.device.segments import uncovered
from plexrl.statemanager.layout.ranges import Piece
from plexrl.statemanager.store.objects import SharedObject
from plexrl.statemanager.store.saving.saving import DonatedSection
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.host.ofd_locks import (
    has_holder,
    has_writer,
    open_for_reader,
    open_for_writer,
)
from plexrl.statemanager.store.tiers.host.worker_file_pool import WorkerFilePool
from plexrl.statemanager.store.tiers.tier_allocator import TierAllocator
from plexrl.statemanager.store.versions.catalog import Catalog

HOST = TierName.HOST


@dataclass(slots=True, eq=False, kw_only=True)
class HostAllocation:
    """Memory allocated to one rank."""

    piece: Piece
    tenant: str
    owner: str
    """Deployment and rank; the same owner may reuse the memory without clearing it."""

    @property
    def description(self) -> str:
        """For messages."""
        return f"host memory of {self.owner!r}"


@dataclass(slots=True, eq=False, kw_only=True)
class HostState:
    """Host memory of one rank. Changed only under the lock of the rank's registration."""

    start: int
    """Arena offset at which host memory begins, after the device arena."""
    nbytes: int
    tenant: str
    owner: str
    """Deployment and rank."""
    near: int | None = None
    """Memory node of the rank's GPU; absent: unknown."""
    allocation: HostAllocation | None = None
    """Memory that the rank writes; absent since a version took it over."""
    snapshot: SharedObject | None = None
    """Object of a stored version that the rank reads from, referenced in the host tier."""
    snapshot_piece: Piece | None = None


class HostAllocations:
    """Host allocations of all ranks. Thread-safe; a `HostState` is guarded by its registration's
    lock."""

    def __init__(self, catalog: Catalog, pool: WorkerFilePool, allocator: TierAllocator) -> None:
        self._catalog = catalog
        self._pool = pool
        self._allocator = allocator
        self._active: set[HostAllocation] = set()
        self._released: set[HostAllocation] = set()
        """Allocations that a process may still have open or mapped."""

    def recover(self) -> None:
        """Keep memory that workers hold since before a restart of the daemon, until they adopt or
        close it."""
        for piece in self._pool.claim_held_files():
            allocation = HostAllocation(piece=piece, tenant="", owner="")
            with self._catalog.lock:
                self._catalog.used_bytes[HOST] += piece.nbytes
                self._released.add(allocation)

    def allocate(self, state: HostState) -> None:
        """Allocate memory for a rank. It holds zeros, or what the same owner left in it.

        Raises:
            StateTierFullError: the host tier has no space, even after eviction.
        """
        self.free_released()
        nbytes = state.nbytes
        allocation = HostAllocation(
            piece=Piece(-1, 0, nbytes), tenant=state.tenant, owner=state.owner
        )
        self._allocator.reserve(allocation, nbytes, nbytes, host_only=True)
        try:
            allocation.piece = self._pool.alloc_file(nbytes, state.owner, state.near)
        except BaseException:
            with self._catalog.lock:
                self._catalog.unreserve(HOST, nbytes)
            raise
        with self._catalog.lock:
            self._active.add(allocation)
        state.allocation = allocation

    def adopt(self, fd: int, state: HostState) -> bool:
        """Adopt a rank's allocation from before a restart, by its descriptor; returns whether it is
        known."""
        piece = self._pool.find_file(fd)
        with self._catalog.lock:
            for allocation in self._released:
                if allocation.piece == piece and allocation.piece.nbytes == state.nbytes:
                    self._released.discard(allocation)
                    allocation.tenant, allocation.owner = state.tenant, state.owner
                    self._active.add(allocation)
                    state.allocation = allocation
                    return True
        return False

    def adopt_snapshot(self, fd: int, state: HostState, shard: tuple[str, int]) -> bool:
        """Adopt the snapshot that a rank read before a restart, by its descriptor; returns whether
        it is known."""
        piece = self._pool.find_file(fd)
        with self._catalog.lock:
            for version in self._catalog.current.values():
                if (version.manifest.deployment, version.manifest.rank) != shard:
                    continue
                for found in version.objects:
                    if piece is not None and found.pieces == (piece,):
                        self._set_snapshot(state, found)
                        return True
        return False

    def read_snapshot(self, state: HostState, found: SharedObject) -> bool:
        """Let the rank read an object in place; returns whether the object has a file of its own,
        which this requires."""
        with self._catalog.lock:
            pieces = found.pieces or ()
            if len(pieces) != 1 or not self._pool.is_file(pieces[0]):
                return False
            self._set_snapshot(state, found)
            return True

    def release_snapshot(self, state: HostState) -> None:
        """Release the snapshot that the rank reads."""
        with self._catalog.lock:
            if state.snapshot is not None:
                self._catalog.release([state.snapshot], HOST)
            state.snapshot = state.snapshot_piece = None

    def release_all(self, state: HostState) -> None:
        """Release the rank's snapshot and allocation."""
        self.release_snapshot(state)
        self.release_allocation(state)

    def release_allocation(self, state: HostState) -> None:
        """Release the rank's allocation."""
        allocation, state.allocation = state.allocation, None
        if allocation is not None:
            with self._catalog.lock:
                self._active.discard(allocation)
                self._released.add(allocation)
        self.free_released()

    def _check_donated(self, allocation: HostAllocation) -> None:
        fd = self._pool.descriptor(allocation.piece.segment)
        if has_writer(fd):
            raise ConflictError(
                f"{allocation.description} is still mapped for writing: its worker must unmap it "
                "first"
            )
        if not self._pool.file(allocation.piece).is_intact():
            raise CorruptStateError(
                f"{allocation.description} was truncated by its worker: load the last version"
            )

    def donate(self, state: HostState, section: int) -> DonatedSection:
        """The rank's host memory as section `section` of a version.

        Raises:
            ConflictError: the rank has no host memory, or can still write to it.
            CorruptStateError: the worker truncated its memory.
        """
        if state.allocation is not None:
            self._check_donated(state.allocation)
            on_taken = partial(self._on_taken, state)
            return DonatedSection(section=section, piece=state.allocation.piece, on_taken=on_taken)
        if state.snapshot is None:
            raise ConflictError(
                f"{state.owner!r} has no optimizer state in host memory: allocate host memory for "
                "it first"
            )
        return DonatedSection(section=section, stored_object=state.snapshot)

    def open(self, state: HostState, *, writable: bool) -> list[int]:
        """Descriptors of the rank's memory, the read-only one first; the caller closes them."""
        piece = state.allocation.piece if state.allocation is not None else state.snapshot_piece
        assert piece is not None
        path = str(self._pool.file(piece).path)
        found = [open_for_reader(path)]
        if writable:
            try:
                found.append(open_for_writer(path))
            except BaseException:
                os.close(found[0])
                raise
        return found

    def joined_memory(self, state: HostState, device: WritableDevice) -> WritableDevice:
        """The rank's device arena and host memory as one address range."""
        piece = state.allocation.piece if state.allocation is not None else state.snapshot_piece
        if piece is None:
            return device
        return _Joined(device, state, self._pool.address(piece))

    def memory(self, state: HostState) -> WritableDevice:
        """Allocated memory, whose first byte has offset 0."""
        assert state.allocation is not None, f"{state.owner!r} has no memory"
        return _Allocated(self._pool.address(state.allocation.piece), state.nbytes)

    def clear(self, state: HostState, covered: Sequence[tuple[int, int]]) -> None:
        """Zero the rank's allocation except for the (offset, bytes) ranges `covered`."""
        assert state.allocation is not None, f"{state.owner!r} has no memory"
        piece = state.allocation.piece
        for offset, nbytes in uncovered(covered, piece.nbytes):
            ctypes.memset(self._pool.address(piece) + offset, 0, nbytes)

    def check_unwritten(self, state: HostState) -> None:
        """Refuse to read memory that its rank can still write to, or has truncated.

        Raises:
            ConflictError: the rank can still write to it.
            CorruptStateError: the rank truncated it.
        """
        assert state.allocation is not None, f"{state.owner!r} has no memory"
        self._check_donated(state.allocation)

    def allocated_bytes(self, tenant: str | None = None) -> int:
        """Bytes allocated to a tenant (absent: to all). The catalog's lock is held."""
        allocations = self._active | self._released
        return sum(
            allocation.piece.nbytes
            for allocation in allocations
            if tenant in (None, allocation.tenant)
        )

    def free_released(self) -> None:
        """Free released allocations that no process holds."""
        with self._catalog.lock:
            for allocation in list(self._released):
                if not has_holder(self._pool.descriptor(allocation.piece.segment)):
                    self._released.discard(allocation)
                    self._catalog.unreserve(HOST, allocation.piece.nbytes)
                    self._pool.free([allocation.piece])

    def _on_taken(self, state: HostState, found: SharedObject) -> None:
        """A version took the allocation over; the rank reads from the version from now on. The
        catalog's lock is held."""
        assert state.allocation is not None
        self._active.discard(state.allocation)
        state.allocation = None
        self._set_snapshot(state, found)

    def _set_snapshot(self, state: HostState, found: SharedObject) -> None:
        self._catalog.acquire([found], HOST)
        previous, state.snapshot = state.snapshot, found
        assert found.pieces is not None
        state.snapshot_piece = found.pieces[0]
        if previous is not None:
            self._catalog.release([previous], HOST)


class _Allocated:
    """As `WritableDevice`: allocated host memory."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address = address
        self.nbytes = nbytes

    def read(self, runs: Sequence[ByteRun]) -> None:
        for run in runs:
            move(run.address, self._address + run.offset, run.nbytes)

    def write(self, runs: Sequence[ByteRun]) -> None:
        for run in runs:
            move(self._address + run.offset, run.address, run.nbytes)


class _Joined:
    """As `WritableDevice`: a device arena followed by host memory."""

    def __init__(self, device: WritableDevice, state: HostState, address: int) -> None:
        self._device = device
        self._start = state.start
        self._address = address
        self.nbytes = state.start + state.nbytes

    def read(self, runs: Sequence[ByteRun]) -> None:
        self._device.read([run for run in runs if run.offset < self._start])
        for run in runs:
            if run.offset >= self._start:
                move(run.address, self._address + run.offset - self._start, run.nbytes)

    def write(self, runs: Sequence[ByteRun]) -> None:
        self._device.write([run for run in runs if run.offset < self._start])
        for run in runs:
            if run.offset >= self._start:
                move(self._address + run.offset - self._start, run.address, run.nbytes)
