"""What a device is to the StateManager, and what an arena is to a worker.

The daemon allocates a device's memory, in segments that it maps itself, and lends them: a worker
is sent one descriptor for each and maps them into the address range that its arena reserved.
Offloading is the way back, after which the same addresses hold nothing. Laws of every backend:

- A worker sees zero, or what the daemon wrote for it, and never what another left in a segment.
- Memory is lent again only after its borrower said that it has unmapped it, and only to the same
  user. If the borrower died or is replaced, its segments are let go of instead.
- Nothing a borrower does with its descriptors can make the daemon fault.
- An allocation that is refused changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from plexrl.statemanager.device.memory import DeviceMemory


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """One device's memory, in bytes."""

    lent_bytes: int
    idle_bytes: int
    """Kept by the daemon for the next borrower; gives way to any allocation."""
    free_bytes: int | None
    """What the device has left beyond these, by its driver's word; absent: not bounded."""


class Loan(DeviceMemory, Protocol):
    """Segments that one arena borrows, in the order in which they lie in it."""

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """Of each; they come to `nbytes` together."""
        ...

    @property
    def is_clean(self) -> bool:
        """Whether all of it reads as zero. A loan that is not must be cleaned before it is sent."""
        ...

    def clear(self, offset: int, nbytes: int) -> None:
        """Make the bytes from `offset` on read as zero. Raises as `read`."""
        ...

    def descriptors(self, *, read_only: bool = False) -> list[int]:
        """One for each segment, to send to the worker; the caller closes them.

        `read_only`: they let it read only, where the device can forbid the rest.
        """
        ...


class DeviceBackend(Protocol):
    """The daemon's side of a node's devices of one kind. Thread-safe; calls block until done."""

    @property
    def kind(self) -> DeviceKind: ...

    def allocate(self, nbytes: int, *, device: int, uid: int) -> Loan:
        """At least `nbytes` on the device of that index, for a worker of user `uid`.

        Raises:
            DeviceMemoryFullError: the device has not so much left; nothing has changed.
            DeviceError: the driver refused.
        """
        ...

    def adopt(
        self, fds: Sequence[int], segment_bytes: Sequence[int], *, device: int, uid: int
    ) -> Loan:
        """A loan of a daemon that is gone, from the descriptors that its borrower kept.

        The descriptors stay the caller's.

        Raises:
            InvalidRequestError: they are not of segments that such a daemon made.
            DeviceMemoryFullError: they are more than this node may lend.
        """
        ...

    def recycle(self, loan: Loan) -> None:
        """Take a loan back that its borrower has unmapped."""
        ...

    def free(self, loan: Loan) -> None:
        """Let go of a loan whose borrower may still have it mapped; it is lent to no one again."""
        ...

    def usage(self, device: int) -> DeviceUsage:
        """The device's memory now. Raises DeviceError: the device can no longer be used."""
        ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Prepare mapped host memory for copies at full speed; where that fails, copies are slow
        and a warning says so."""
        ...

    def unregister_host(self, address: int, nbytes: int) -> None:
        """Undo `register_host`, before the memory is unmapped."""
        ...

    def close(self) -> None:
        """Give everything back that is not lent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A segment as it is sent to a worker."""

    fd: int
    nbytes: int


class WorkerArena(Protocol):
    """A worker's side: a range of addresses, which stay valid whether memory is behind them."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def device(self) -> int:
        """Index of the device that its memory lies on; 0 on CPU nodes."""
        ...

    @property
    def nbytes(self) -> int:
        """Of the range."""
        ...

    @property
    def address(self) -> int:
        """Of its first byte, on the device."""
        ...

    @property
    def is_attached(self) -> bool:
        """Whether borrowed memory is behind it."""
        ...

    @property
    def segments(self) -> tuple[Segment, ...]:
        """What is attached, with the arena's own descriptors: a restarted daemon adopts these."""
        ...

    def attach(
        self, segments: Sequence[Segment], *, keep_contents: bool, read_only: bool = False
    ) -> None:
        """Map segments, which take over the descriptors; they must be at least `nbytes` together.

        `keep_contents`: what was written while nothing was attached (where the device allows that)
        is carried over; otherwise the arena holds what the segments hold. `read_only`: they must
        not be written to, as their descriptors do not allow it.

        Raises:
            InvalidRequestError: they do not fit; the descriptors are closed.
            DeviceError: the driver refused; nothing is attached.
        """
        ...

    def detach(self) -> None:
        """Unmap the segments once the device is done with them, and close their descriptors."""
        ...

    def resident_bytes(self) -> int:
        """Memory that the arena occupies now."""
        ...

    def close(self) -> None:
        """As `detach`; the addresses end with the last view of them."""
        ...
