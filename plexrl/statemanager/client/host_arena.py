"""Host arena: a worker's optimizer state in its StateManager's host tier.

Its addresses never change. They map one of:

- borrowed memory, which the worker writes;
- a stored version's own bytes, read-only, after that version was made of the arena's memory or
  loaded. The next write goes to newly borrowed memory, copied on the way. So a version never
  changes, and no move copies state that stays in host memory;
- private memory, before the arena is registered.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from plexrl.statemanager.device.mapping import map_file, map_over, map_zero, move, unmap
from plexrl.statemanager.device.memory import MemoryUsers
from plexrl.statemanager.layout.ranges import PAGE_BYTES
from plexrl.statemanager.layout.versions import padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """Memory lent by the StateManager."""

    reader: int
    """Read-only descriptor."""
    writer: int
    """Writable descriptor."""
    holds: bool
    """Whether this is memory that was returned before and still has its contents."""


class Lender(Protocol):
    """Lends memory to a host arena."""

    def borrow(self) -> Borrowed:
        """Borrow memory of the arena's size."""
        ...

    def copied(self) -> None:
        """Report that the memory mapped before the last `borrow` is no longer read."""
        ...

    def abandoned(self) -> None:
        """Return the last borrowed memory unused."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Addresses during a write: the state is read at `source` and written at `target`."""

    source: int
    target: int

    @property
    def copies(self) -> bool:
        """Whether unchanged bytes must be copied too."""
        return self.source != self.target


class HostArena:
    """Optimizer state in host memory. Not thread-safe."""

    def __init__(self, nbytes: int) -> None:
        """Reserves addresses for at least `nbytes`, which read as zero."""
        self.nbytes = max(PAGE_BYTES, padded(nbytes))
        self.address = map_zero(self.nbytes)
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        ending = weakref.finalize(memory, unmap, self.address, self.nbytes)
        ending.atexit = False
        self.buffer = memoryview(memory).cast("B")
        """Always valid; write to it only within `writing`."""
        self.reader: int | None = None
        """Descriptor of the mapped memory; absent: unknown to the StateManager."""
        self.is_writable = True
        self.users = MemoryUsers()
        """Threads that must end before the memory or its contents change."""
        self.lender: Lender | None = None
        """Absent before registration, while the arena is private."""
        self._reserved: Borrowed | None = None
        """Memory for the next write; absent: none."""

    def reserve(self) -> None:
        """Borrow now what the next write needs, if it needs any. Raises as `writing`."""
        if not self.is_writable and self.lender is not None and self._reserved is None:
            self._reserved = self.lender.borrow()

    def unreserve(self) -> None:
        """Return what was reserved, if no write has taken it."""
        reserved, self._reserved = self._reserved, None
        if reserved is None:
            return
        os.close(reserved.reader)
        os.close(reserved.writer)
        if not reserved.holds and self.lender is not None:
            self.lender.abandoned()

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        """Allow writes while the block runs. If the `Writing` copies, the block writes all bytes,
        and an exception leaves the arena unchanged.

        Raises:
            StateTierFullError: the host tier has no space for a copy in addition to the version.
        """
        self.users.end()
        if self.is_writable or self.lender is None:
            yield Writing(source=self.address, target=self.address)
            return
        self.reserve()
        lent, self._reserved = self._reserved, None
        assert lent is not None, "it was reserved"
        if lent.holds:
            self._map(lent, self.address)
            yield Writing(source=self.address, target=self.address)
            return
        spare = self._map(lent, None)
        try:
            yield Writing(source=self.address, target=spare)
        except BaseException:
            unmap(spare, self.nbytes)
            os.close(lent.reader)
            self.lender.abandoned()
            raise
        map_over(spare, self.nbytes, self.address)
        self._holds(lent.reader, is_writable=True)
        self.lender.copied()

    def give_up(self) -> None:
        """Make the memory read-only and known to the StateManager, so that a version can be made of
        it. Raises as `writing`."""
        self.users.end()
        if self.reader is None and self.lender is not None:
            # The memory is private, or a restarted StateManager does not know it.
            lent = self.lender.borrow()
            spare = self._map(lent, None)
            move(spare, self.address, self.nbytes)
            map_over(spare, self.nbytes, self.address)
            self._holds(lent.reader, is_writable=True)
        if self.is_writable:
            assert self.reader is not None
            self._map_to_read(self.reader)

    def attach(self, reader: int, writer: int | None) -> None:
        """Map the memory from a load: a version's own bytes, or with `writer` a copy of them."""
        self.users.end()
        if writer is None:
            try:
                self._map_to_read(reader)
            except OSError:
                os.close(reader)
                raise
            self._holds(reader, is_writable=False)
        else:
            self._map(Borrowed(reader=reader, writer=writer, holds=True), self.address)

    def forget_lent(self) -> None:
        """Record that the StateManager does not know the mapped memory."""
        if self.reader is not None:
            os.close(self.reader)
            self.reader = None

    def detach(self) -> None:
        """Unmap the lent memory; the arena then reads as zero."""
        self.users.end()
        map_zero(self.nbytes, self.address)
        self.forget_lent()
        self.is_writable = True

    def _map(self, lent: Borrowed, address: int | None) -> int:
        """Map memory writable; only the mapping keeps it writable."""
        try:
            at = map_file(lent.writer, self.nbytes, address)
        except OSError:
            os.close(lent.reader)
            raise
        finally:
            os.close(lent.writer)
        if address is not None:
            self._holds(lent.reader, is_writable=True)
        return at

    def _map_to_read(self, fd: int) -> None:
        # Pages are mapped when they are read; after an offload none is.
        map_file(fd, self.nbytes, self.address, protection=mmap.PROT_READ, populate=False)
        self.is_writable = False

    def _holds(self, reader: int, *, is_writable: bool) -> None:
        if self.reader is not None:
            os.close(self.reader)
        self.reader, self.is_writable = reader, is_writable
