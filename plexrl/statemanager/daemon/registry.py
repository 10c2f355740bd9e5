"""Arenas that workers handed to the daemon: one for each rank of each deployment."""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from plexrl.errors import ConflictError, DeviceError, InvalidRequestError
from plexrl.statemanager.device.backend import DeviceBackend, Loan
from plexrl.statemanager.host.allocations import HostLoans, HostState
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, DTYPE_BYTES, StatePart, StateSlice
from plexrl.statemanager.layout.layout import DataLayout, lay_out

LOG = logging.getLogger(__name__)

Shard = tuple[str, int]
"""Deployment and rank."""


@dataclass(slots=True, eq=False, kw_only=True)
class Registration:
    """One rank's arena, and the memory that is lent to it while it is on the device.

    Only one move is under way at a time (`in_move`), and a registration ends between moves."""

    deployment: str
    rank: int
    world_size: int
    group: str
    slices: tuple[StateSlice, ...]
    arena_bytes: int
    device: int
    uid: int
    """The worker's user."""
    devices: DeviceBackend
    loan: Loan | None = None
    """Absent while the state is off the device."""
    host: HostState | None = None
    """Of state that stays in host memory; absent: there is none."""
    loans: HostLoans | None = None
    """Where `host` came from."""
    in_move: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False
    layouts: dict[tuple[StatePart, ...], tuple[int, DataLayout]] = field(default_factory=dict)
    """By what is saved: how it was laid out last, and in which of the registry's generations."""

    @property
    def shard(self) -> Shard:
        return (self.deployment, self.rank)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """One at a time, for as long as the registration is not ended.

        Raises:
            ConflictError: another process has registered this rank.
        """
        with self.in_move:
            if self.ended:
                raise ConflictError(
                    f"rank {self.rank} of {self.deployment!r} was registered by another process or "
                    "released: only one may move its state",
                    deployment=self.deployment,
                    rank=self.rank,
                )
            yield

    @contextmanager
    def moving(self) -> Iterator[Loan]:
        """The arena's memory, for one move at a time.

        Raises:
            ConflictError: the arena has none, or as for `in_turn`.
        """
        with self.in_turn():
            if self.loan is None:
                raise ConflictError(
                    f"rank {self.rank} of {self.deployment!r} has no memory on the device: load "
                    "its state first",
                    deployment=self.deployment,
                    rank=self.rank,
                )
            yield self.loan

    def end(self) -> None:
        """Let go of the memory once the move that is under way is over: the worker may still have
        it mapped, so nobody else gets it."""
        with self.in_move:
            loan, self.loan = self.loan, None
            self.ended = True
            if self.host is not None and self.loans is not None:
                self.loans.end(self.host)
            if loan is None:
                return
            try:
                self.devices.free(loan)
            except DeviceError:
                LOG.exception("memory of %s could not be given back to its device", self.shard)


class Registry:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registrations: dict[Shard, Registration] = {}
        self._generation = 0

    def add(self, registration: Registration) -> None:
        """Take in an arena; the rank's former one is ended once its move is over."""
        with self._lock:
            former = self._registrations.get(registration.shard)
            self._registrations[registration.shard] = registration
            self._generation += 1
        if former is not None:
            former.end()

    def remove(self, registration: Registration) -> None:
        """End a registration; no effect on one that took its place."""
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
        """How a version of some parts of a rank's state is laid out beside the other ranks here.

        Remembered for as long as nobody comes or goes: with many slices it takes milliseconds.
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

    def of(self, deployment: str) -> list[Registration]:
        """The deployment's ranks that are registered here, in order."""
        with self._lock:
            found = [r for (name, _), r in self._registrations.items() if name == deployment]
        return sorted(found, key=lambda registration: registration.rank)

    def resident_bytes(self) -> dict[Shard, int]:
        """Device memory that each arena has now."""
        with self._lock:
            found = sorted(self._registrations.items(), key=lambda item: item[0])
        return {shard: 0 if (loan := r.loan) is None else loan.nbytes for shard, r in found}


def check_slices(slices: Sequence[StateSlice], arena_bytes: int) -> None:
    """Refuse slices that cannot lie in an arena of `arena_bytes`.

    Raises:
        InvalidRequestError: one reaches out of the arena or of its tensor, is not aligned, or has
            an unknown dtype.
    """
    for piece in slices:
        name = piece.key.name
        if piece.dtype not in DTYPE_BYTES:
            raise InvalidRequestError(f"slice {name!r} has unknown dtype {piece.dtype!r}")
        if not len(piece.offset) == len(piece.shape) == len(piece.global_shape):
            raise InvalidRequestError(f"slice {name!r} mixes numbers of dimensions")
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
