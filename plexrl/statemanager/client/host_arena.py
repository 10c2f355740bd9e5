"""A worker's optimizer state in memory of its StateManager's host tier.

The addresses are the worker's for good. Behind them is, in turn:

- memory that it borrowed, and writes to;
- a stored version's own bytes, read-only: what the worker had when that version was made of its
  memory, or loaded. Who writes next copies them to memory newly borrowed, piece by piece as it
  goes; so a version is never changed, and no move copies what stays in host memory;
- private memory, before a StateManager is told of it.
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
from plexrl.statemanager.store.versions.versions import padded
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """Memory as the StateManager lends it."""

    reader: int
    """A descriptor that only reads."""
    writer: int
    """One that writes."""
    holds: bool
    """It is what was borrowed and given up before, with its contents."""


class Lender(Protocol):
    """Where a host arena borrows."""

    def borrow(self) -> Borrowed:
        """Memory of the arena's size."""
        ...

    def copied(self) -> None:
        """What was read before the last borrowing is not read any more."""
        ...

    def abandoned(self) -> None:
        """Nothing came of the last borrowing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Where state is while it is written: read at `source`, written at `target`."""

    source: int
    target: int

    @property
    def copies(self) -> bool:
        """Whether what is not changed has to be copied too."""
        return self.source != self.target


class HostArena:
    """Not for use by several threads at once."""

    def __init__(self, nbytes: int) -> None:
        """A range of at least `nbytes` that reads as zero."""
        self.nbytes = max(PAGE_BYTES, padded(nbytes))
        self.address = map_zero(self.nbytes)
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        ending = weakref.finalize(memory, unmap, self.address, self.nbytes)
        ending.atexit = False
        self.buffer = memoryview(memory).cast("B")
        """Valid for good; to be written to in `writing` only."""
        self.reader: int | None = None
        """A descriptor of what is mapped; absent: it is private, or its StateManager forgot it."""
        self.is_writable = True
        self.lender: Lender | None = None
        """Absent until the arena is registered: it is private till then."""

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        """Have the state written while the block runs: all of it, where the `Writing` copies.

        A block that raises leaves the arena as it was, where it had to copy.

        Raises:
            StateTierFullError: there is no room for a copy beside the version it is made of.
        """
        if self.is_writable or self.lender is None:
            yield Writing(source=self.address, target=self.address)
            return
        lent = self.lender.borrow()
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
        """Make it memory of the StateManager's that nobody writes to, so a version can be made of
        it. Raises as `writing`."""
        if self.reader is None and self.lender is not None:
            # Private till now, or of a StateManager that knows it no more.
            lent = self.lender.borrow()
            spare = self._map(lent, None)
            move(spare, self.address, self.nbytes)
            map_over(spare, self.nbytes, self.address)
            self._holds(lent.reader, is_writable=True)
        if self.is_writable:
            assert self.reader is not None
            self._map_to_read(self.reader)

    def attach(self, reader: int, writer: int | None) -> None:
        """Map what a load brought: a version's own bytes, or with `writer` a copy of them."""
        if writer is None:
            self._map_to_read(reader)
            self._holds(reader, is_writable=False)
        else:
            self._map(Borrowed(reader=reader, writer=writer, holds=True), self.address)

    def forget_lent(self) -> None:
        """The StateManager does not know what is mapped, so no version can be made of it."""
        if self.reader is not None:
            os.close(self.reader)
            self.reader = None

    def detach(self) -> None:
        """Unmap what was lent; the arena reads as zero."""
        map_zero(self.nbytes, self.address)
        self.forget_lent()
        self.is_writable = True

    def _map(self, lent: Borrowed, address: int | None) -> int:
        """Map memory to write to; the mapping alone keeps it open for that."""
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
        # Pages come as they are read: after an offload none is.
        map_file(fd, self.nbytes, self.address, protection=mmap.PROT_READ, populate=False)
        self.is_writable = False

    def _holds(self, reader: int, *, is_writable: bool) -> None:
        if self.reader is not None:
            os.close(self.reader)
        self.reader, self.is_writable = reader, is_writable
