"""A worker's arena on a CPU node."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence

from plexrl.errors import DeviceError, InvalidRequestError
from plexrl.statemanager.device.backend import DeviceKind, DeviceSegment
from plexrl.statemanager.device.cpu.returned_mappings import ReturnedMappings
from plexrl.statemanager.device.mapping import (
    PAGE,
    map_file,
    map_zero,
    move,
    reserve_aligned,
    unmap,
)
from plexrl.statemanager.device.memory import MemoryUsers
from plexrl.statemanager.device.segments import SEGMENT_BYTES_MIN

KEPT_ARENAS = 4
"""Arenas of this size whose returned mappings are kept: ranks of one node take turns with the same
segments."""


class CpuArena:
    """Implements `WorkerArena`. While nothing is attached, the range is private zero memory, so a
    model can be built in it before the daemon allocates memory."""

    kind = DeviceKind.CPU
    device = 0
    uuid = ""

    def __init__(self, nbytes: int) -> None:
        """Reserve a range of at least `nbytes`."""
        self.nbytes = max(1, -(-nbytes // PAGE)) * PAGE
        # Segments are multiples of a unit, so the last one may reach beyond the arena.
        self._reserved_bytes = -(-self.nbytes // SEGMENT_BYTES_MIN) * SEGMENT_BYTES_MIN
        self.address = reserve_aligned(self._reserved_bytes)
        self.segments: tuple[DeviceSegment, ...] = ()
        self.users = MemoryUsers()
        self._is_read_only = False
        self._returned = ReturnedMappings(KEPT_ARENAS * self._reserved_bytes)
        weakref.finalize(self, self._returned.clear).atexit = False
        memory = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        # Every view of the buffer references `memory`, so the range is unmapped after the last
        # view.
        ending = weakref.finalize(memory, unmap, self.address, self._reserved_bytes)
        ending.atexit = False
        self.buffer = memoryview(memory).cast("B")
        """Writable view of the whole arena; always valid."""

    @property
    def is_attached(self) -> bool:
        return bool(self.segments)

    def attach(
        self, segments: Sequence[DeviceSegment], *, keep_contents: bool, read_only: bool = False
    ) -> None:
        taken = tuple(segments)
        self.users.end()
        try:
            if self.segments or sum(s.nbytes for s in taken) != self._reserved_bytes:
                raise InvalidRequestError(
                    f"segments of {[s.nbytes for s in taken]} bytes do not fit an arena of "
                    f"{self._reserved_bytes} that has {len(self.segments)} attached"
                )
            self._map(taken, keep_contents=keep_contents, read_only=read_only)
        except BaseException:
            _close(taken)
            raise
        self.segments, self._is_read_only = taken, read_only

    def detach(self) -> None:
        """See `WorkerArena.detach`; afterwards the arena reads as zero."""
        self.users.end()
        if not self._is_read_only:
            # Read-only memory is shared with other arenas, which may need it after it is evicted.
            self._returned.keep(self.segments, self.address)
        map_zero(self._reserved_bytes, self.address)
        _close(self.segments)
        self.segments = ()

    def resident_bytes(self) -> int:
        """Attached memory, without pages written while nothing is attached."""
        return sum(segment.nbytes for segment in self.segments)

    def returned_bytes(self) -> int:
        return self._returned.nbytes

    def forget_returned(self) -> None:
        self._returned.clear()

    def close(self) -> None:
        self.detach()
        self.forget_returned()

    def _map(
        self, segments: Sequence[DeviceSegment], *, keep_contents: bool, read_only: bool
    ) -> None:
        # A second mapping of each segment, to copy the contents there, and back on an error.
        spare: list[int] = []
        protection = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        address = self.address
        try:
            for segment in segments:
                if not (keep_contents or read_only) and self._returned.restore(segment, address):
                    address += segment.nbytes
                    continue
                if keep_contents:
                    spare.append(map_file(segment.fd, segment.nbytes))
                    move(spare[-1], address, segment.nbytes)
                map_file(segment.fd, segment.nbytes, address, protection=protection)
                address += segment.nbytes
        except OSError as error:
            map_zero(address - self.address, self.address)
            for (start, nbytes), copy in zip(
                _address_ranges(segments, self.address), spare, strict=False
            ):
                if start < address:
                    move(start, copy, nbytes)
            raise DeviceError(f"a segment cannot be mapped ({error})") from error
        finally:
            for segment, at in zip(segments, spare, strict=False):
                unmap(at, segment.nbytes)


def _address_ranges(segments: Sequence[DeviceSegment], address: int) -> Iterator[tuple[int, int]]:
    for segment in segments:
        yield address, segment.nbytes
        address += segment.nbytes


def _close(segments: Sequence[DeviceSegment]) -> None:
    for segment in segments:
        os.close(segment.fd)
