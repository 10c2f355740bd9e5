"""Interfaces of a device: the daemon's backend, and the worker's arena.

The daemon allocates device memory in segments and maps them itself. A worker gets one descriptor
per segment and maps the segments into the address range that its arena reserved. An offload unmaps
them; the addresses stay reserved. Invariants of every backend:

- A worker reads zeros, or what the daemon wrote for it, never another worker's data.
- Memory is reused only after the worker reported that no address of its arena refers to it, and
  only for the same user. If the worker died or was replaced, its segments are freed instead.
- No use of the descriptors by a worker can make the daemon fault.
- An allocation that fails changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from plexrl.statemanager.device.memory import MemoryUsers, WritableDevice


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """One device's memory, in bytes."""

    lent_bytes: int
    idle_bytes: int
    """Memory that the daemon keeps for the next allocation."""
    free_bytes: int | None
    """Free memory in addition to these, as the driver reports it; absent: unbounded."""


class DeviceAllocation(WritableDevice, Protocol):
    """Device memory of one arena: segments, in arena order."""

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """Size of each segment; their sum is `nbytes`."""
        ...

    @property
    def is_clean(self) -> bool:
        """Whether all of it reads as zero. Other memory must be cleared before it is sent to a
        worker."""
        ...

    def clear(self, offset: int, nbytes: int) -> None:
        """Set `nbytes` from `offset` on to zero. Raises as `read`."""
        ...

    def descriptors(self, *, read_only: bool = False) -> list[int]:
        """One descriptor per segment, for the worker; the caller closes them.

        `read_only`: they allow no writes, if the device supports that.
        """
        ...


class DeviceBackend(Protocol):
    """Allocates the memory of a node's devices of one kind. Thread-safe; calls block until done."""

    @property
    def kind(self) -> DeviceKind: ...

    def allocate(self, nbytes: int, *, device: int, uid: int) -> DeviceAllocation:
        """Allocate at least `nbytes` on the device of that index, for a worker of user `uid`.

        Raises:
            DeviceMemoryFullError: the device has too little free memory; nothing has changed.
            DeviceError: the driver failed.
        """
        ...

    def allocate_part(
        self, nbytes: int, *, device: int, uid: int, bytes_max: int, bytes_wanted: int
    ) -> DeviceAllocation | None:
        """The first segments of what `allocate` would allocate: `bytes_max` at most, and no more
        than hold the first `bytes_wanted`. None: no segment is that small. No worker has it until
        `extend`. Raises as `allocate`."""
        ...

    def extend(self, part: DeviceAllocation, nbytes: int) -> DeviceAllocation:
        """The whole arena of a part, which ends; its contents stay.

        Raises:
            DeviceMemoryFullError: the device has too little free memory; the part is as before.
            DeviceError: the driver failed; the part has ended.
        """
        ...

    def adopt(
        self, fds: Sequence[int], segment_bytes: Sequence[int], *, device: int, uid: int
    ) -> DeviceAllocation:
        """Adopt an allocation of a previous daemon, from the descriptors that the worker kept.

        The caller keeps ownership of the descriptors.

        Raises:
            InvalidRequestError: a descriptor does not refer to a segment of a StateManager.
            DeviceMemoryFullError: the segments exceed the capacity.
        """
        ...

    def recycle(self, allocation: DeviceAllocation) -> None:
        """Reclaim an allocation that its worker has unmapped."""
        ...

    def free(self, allocation: DeviceAllocation, *, is_unmapped: bool = False) -> None:
        """Free an allocation whose worker may still use it; it is not reused. `is_unmapped`: the
        worker has ended."""
        ...

    def release_idle(self, device: int) -> None:
        """Release what is kept for the next allocation on that device."""
        ...

    def index_of(self, uuid: str) -> int:
        """Index of the device with that UUID, for the other methods.

        Raises:
            DeviceUnavailableError: this daemon has no such device.
        """
        ...

    def pci_addresses(self) -> tuple[str, ...]:
        """Address of each device on the PCI bus; none on a CPU node."""
        ...

    def usage(self, device: int) -> DeviceUsage:
        """Current memory usage. Raises DeviceError: the device can no longer be used."""
        ...

    def process_bytes(self, device: int) -> Mapping[int, int] | None:
        """Device memory of each process but this one, by process id; None: unknown. Takes up to
        seconds."""
        ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin mapped host memory for fast copies; if that fails, logs a warning, and copies are
        slow."""
        ...

    def unregister_host(self, address: int, nbytes: int) -> None:
        """Undo `register_host` before the memory is unmapped."""
        ...

    def close(self) -> None:
        """Free all memory that is not allocated to workers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSegment:
    """A segment's descriptor and size, as sent to a worker."""

    fd: int
    nbytes: int


class WorkerArena(Protocol):
    """A worker's reserved address range, with or without memory behind it."""

    @property
    def users(self) -> MemoryUsers:
        """Threads that must end before `attach` and `detach` change the mapping."""
        ...

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def device(self) -> int:
        """Index of the arena's device in this process; 0 on CPU nodes."""
        ...

    @property
    def uuid(self) -> str:
        """UUID of the arena's GPU; empty: unknown, or a CPU node."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the range."""
        ...

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        ...

    @property
    def is_attached(self) -> bool:
        """Whether memory is mapped."""
        ...

    @property
    def segments(self) -> tuple[DeviceSegment, ...]:
        """The mapped segments with the arena's descriptors, which a restarted daemon adopts."""
        ...

    def attach(
        self, segments: Sequence[DeviceSegment], *, keep_contents: bool, read_only: bool = False
    ) -> None:
        """Map segments of at least `nbytes` together; the arena takes over the descriptors.

        `keep_contents`: copy what was written while nothing was attached, if the device allows such
        writes; otherwise the arena shows the segments' contents. `read_only`: map for reading only.

        Raises:
            InvalidRequestError: the segments do not fit; the descriptors are closed.
            DeviceError: the driver failed; nothing is attached.
        """
        ...

    def detach(self) -> None:
        """Wait for `users` and the device, unmap the segments and close their descriptors."""
        ...

    def resident_bytes(self) -> int:
        """Mapped memory in bytes."""
        ...

    def returned_bytes(self) -> int:
        """Returned memory that the arena keeps mapped elsewhere, because its next loan is then
        quicker. It is the daemon's."""
        ...

    def forget_returned(self) -> None:
        """Unmap returned memory: the daemon that lent it is gone."""
        ...

    def close(self) -> None:
        """As `detach`; the address range is released with its last view."""
        ...
