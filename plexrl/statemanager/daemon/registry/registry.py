"""Arenas that workers registered: one per rank of each deployment."""

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from plexrl.errors import ConflictError, DeviceError, InvalidRequestError
from plexrl.statemanager.device.backend import DeviceAllocation, DeviceBackend
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, DTYPE_BYTES, StatePart, StateSlice
from plexrl.statemanager.layout.layout import DataLayout, lay_out
from plexrl.statemanager.store.tiers.host.allocations import HostAllocations, HostState

LOG = logging.getLogger(__name__)

Shard = tuple[str, int]
"""Deployment and rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchedArena:
    """The first segments of an arena, filled from a version before its load."""

    allocation: DeviceAllocation
    stamp: str
    """Stamp of the version."""
    bytes_moved: int
    """Bytes of the version that are there."""
    began_at: float
    """When the prefetch began, by `time.perf_counter`."""
    seconds: float

    def seconds_before(self, now: float) -> float:
        """Seconds of its duration that were before `now`."""
        return min(self.seconds, max(0.0, now - self.began_at))


@dataclass(slots=True, eq=False, kw_only=True)
class Registration:
    """One rank's arena, and the device memory allocated to it.

    `lock` serialises moves, and a registration ends between two moves."""

    deployment: str
    rank: int
    world_size: int
    group: str
    slices: tuple[StateSlice, ...]
    arena_bytes: int
    device: int
    uid: int
    """User of the worker process."""
    devices: DeviceBackend
    pid: int = 0
    """Id of the worker process; 0: unknown."""
    allocation: DeviceAllocation | None = None
    """Device memory; absent while the state is off the device."""
    prefetched: PrefetchedArena | None = None
    """The part of the next load that is on the device already; absent: none."""
    host: HostState | None = None
    """State that stays in host memory; absent: none."""
    step: HostState | None = None
    """Memory for the arena's slices during a step of the stored state; absent: no step."""
    step_since: int = 0
    """Token under which the version was stored that the step began with."""
    host_allocations: HostAllocations | None = None
    """Owner of `host`."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False
    layouts: dict[tuple[StatePart, ...], tuple[int, DataLayout]] = field(default_factory=dict)
    """Cached layout of each set of parts, and the registry's generation for which it is valid."""
    pulled: dict[str, int] = field(default_factory=dict)
    """Source → bytes that the rank pulls of its versions over the network."""

    @property
    def shard(self) -> Shard:
        return (self.deployment, self.rank)

    @property
    def description(self) -> str:
        """For messages."""
        return f"rank {self.rank} of {self.deployment!r}"

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the registration's lock.

        Raises:
            ConflictError: the registration has ended: another process registered this rank.
        """
        with self.lock:
            if self.ended:
                raise ConflictError(
                    f"{self.description} was registered by another process or released: only one "
                    "process may move its state",
                    deployment=self.deployment,
                    rank=self.rank,
                )
            yield

    @contextmanager
    def exclusive_memory(self) -> Iterator[DeviceAllocation]:
        """Hold the registration's lock; yields the arena's device memory.

        Raises:
            ConflictError: the arena has no device memory, or as `exclusive`.
        """
        with self.exclusive():
            if self.allocation is None:
                raise ConflictError(
                    f"{self.description} has no memory on the device: load its state first",
                    deployment=self.deployment,
                    rank=self.rank,
                )
            yield self.allocation

    def end(self) -> None:
        """Free the memory after the current move. The worker may still have it mapped, so it is not
        allocated again."""
        with self.lock:
            allocation, self.allocation = self.allocation, None
            self.ended = True
            self.release_host()
            self.recycle_prefetched()
            if allocation is None:
                return
            try:
                self.devices.free(allocation, is_unmapped=_has_ended(self.pid))
            except DeviceError:
                LOG.exception("device memory of %s could not be freed", self.description)

    def release_host(self) -> None:
        """Release all host memory; the lock is held."""
        step, self.step = self.step, None
        for state in (self.host, step):
            if state is not None and self.host_allocations is not None:
                self.host_allocations.release_all(state)

    def take_prefetched(self) -> PrefetchedArena | None:
        """Take the prefetched part; the caller owns its memory. The lock is held."""
        prefetched, self.prefetched = self.prefetched, None
        return prefetched

    def drop_prefetched(self) -> None:
        """Free the memory of what is prefetched, after the current move."""
        with self.lock:
            self.recycle_prefetched()

    def try_drop_prefetched(self) -> bool:
        """As `drop_prefetched` if no move runs; returns whether there was anything."""
        if self.prefetched is None or not self.lock.acquire(blocking=False):
            return False
        try:
            return self.recycle_prefetched()
        finally:
            self.lock.release()

    def recycle_prefetched(self) -> bool:
        """As `drop_prefetched`; the lock is held. Returns whether there was anything."""
        prefetched = self.take_prefetched()
        if prefetched is None:
            return False
        try:
            self.devices.recycle(prefetched.allocation)
        except DeviceError:
            LOG.exception("prefetched memory of %s could not be freed", self.description)
        return True


def _has_ended(pid: int) -> bool:
    """Whether the process has no memory any more; false if that is unknown."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
        # A process that is not reaped yet.
        return Path(f"/proc/{pid}/statm").read_text().startswith("0 ")
    except ProcessLookupError:
        return True
    except OSError:
        return False


class Registry:
    """The registered arenas by shard. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registrations: dict[Shard, Registration] = {}
        self._generation = 0

    def add(self, registration: Registration) -> None:
        """Add an arena; the rank's previous registration ends after its current move."""
        with self._lock:
            previous = self._registrations.get(registration.shard)
            self._registrations[registration.shard] = registration
            self._generation += 1
        if previous is not None:
            previous.end()

    def remove(self, registration: Registration) -> None:
        """End a registration; no effect on a newer one of the same rank."""
        with self._lock:
            if self._registrations.get(registration.shard) is registration:
                del self._registrations[registration.shard]
                self._generation += 1
        registration.end()

    def remove_deployment(self, deployment: str) -> None:
        """End every registration of a deployment."""
        with self._lock:
            own = [r for shard, r in self._registrations.items() if shard[0] == deployment]
        for registration in own:
            self.remove(registration)

    def layout(self, own: Registration, parts: Iterable[StatePart]) -> DataLayout:
        """The layout of a version of these parts, given the other registered ranks.

        Cached until a rank registers or leaves: with many slices it takes milliseconds.
        """
        saved = tuple(sorted(parts))
        with self._lock:
            generation = self._generation
            others = {
                rank: registration.slices
                for (deployment, rank), registration in self._registrations.items()
                if deployment == own.deployment and rank != own.rank
            }
        known = own.layouts.get(saved)
        if known is not None and known[0] == generation:
            return known[1]
        slices = [piece for piece in own.slices if piece.key.part in saved]
        start = own.arena_bytes if own.host is None else own.host.start
        on_device = [piece for piece in slices if piece.arena_offset < start]
        apart = [piece for piece in slices if piece.arena_offset >= start]
        made = lay_out(on_device, own.rank, others, apart)
        own.layouts[saved] = (generation, made)
        return made

    def note_pull(self, registration: Registration, source: str, nbytes: int) -> int:
        """Record that a rank pulls `nbytes` of each version of a source; returns the bytes that
        all ranks pull."""
        registration.pulled[source] = nbytes
        return self.bytes_pulled(source)

    def bytes_pulled(self, source: str) -> int:
        """Bytes of each version of a source that the registered ranks pull."""
        with self._lock:
            return sum(
                registration.pulled.get(source, 0) for registration in self._registrations.values()
            )

    def on_device(self, device: int) -> list[Registration]:
        """The ranks of a device, in the order of their names."""
        with self._lock:
            found = sorted(self._registrations.items(), key=lambda item: item[0])
        return [registration for _, registration in found if registration.device == device]

    def resident_bytes(self) -> dict[Shard, int]:
        """Device memory of each arena."""
        with self._lock:
            found = sorted(self._registrations.items(), key=lambda item: item[0])
        return {shard: 0 if (own := r.allocation) is None else own.nbytes for shard, r in found}

    def state_bytes(self) -> int:
        """State in device memory, which an offload of all ranks would save."""
        with self._lock:
            held = [r for r in self._registrations.values() if r.allocation is not None]
        return sum(
            piece.nbytes for r in held for piece in r.slices if piece.arena_offset < r.arena_bytes
        )


def check_slices(slices: Sequence[StateSlice], arena_bytes: int) -> None:
    """Refuse slices that do not fit an arena of `arena_bytes`.

    Raises:
        InvalidRequestError: a slice reaches out of the arena or its tensor, is not aligned, or has
            an unknown dtype.
    """
    for piece in slices:
        name = piece.key.name
        if piece.dtype not in DTYPE_BYTES:
            raise InvalidRequestError(f"slice {name!r} has unknown dtype {piece.dtype!r}")
        if not len(piece.offset) == len(piece.shape) == len(piece.global_shape):
            raise InvalidRequestError(
                f"slice {name!r} has an offset, a shape and a global shape of different ranks"
            )
        box = zip(piece.offset, piece.shape, piece.global_shape, strict=True)
        if any(start < 0 or extent < 0 or start + extent > whole for start, extent, whole in box):
            raise InvalidRequestError(f"slice {name!r} reaches out of its tensor")
        if piece.arena_offset < 0 or piece.arena_offset % ARENA_ALIGNMENT:
            raise InvalidRequestError(
                f"slice {name!r} lies at {piece.arena_offset}, not a multiple of {ARENA_ALIGNMENT}"
            )
        if piece.arena_offset + piece.nbytes > arena_bytes:
            end = piece.arena_offset + piece.nbytes
            raise InvalidRequestError(
                f"slice {name!r} reaches to byte {end} of an arena of {arena_bytes}"
            )
