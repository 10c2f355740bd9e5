"""Mappings of segments that an arena has returned, kept for the next loan of the same segments.

To map or unmap a segment costs as much as to copy it, because every page of 4 KiB is counted. To
move a mapping costs nothing, because the kernel moves page tables of 2 MiB. So a returned segment's
mapping moves out of the arena, to an address that nothing knows, and moves back when the segment is
lent to this worker again. The StateManager may lend the segment to other workers of the user
meanwhile, and frees its pages for all when it no longer needs them.
"""

import os
from collections.abc import Sequence

from plexrl.statemanager.device.backend import DeviceSegment
from plexrl.statemanager.device.mapping import map_over, move_pages, reserve_aligned, unmap

_File = tuple[int, int]
"""Device and inode, which are not reused while the file is mapped."""


class ReturnedMappings:
    """The kept mappings of one arena. Not thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max` bounds the mapped memory; the oldest mappings are dropped."""
        self._bytes_max = bytes_max
        self._kept: dict[_File, tuple[int, int]] = {}
        """(address, bytes), in the order in which they were returned."""
        self.nbytes = 0
        """Memory that is mapped."""

    def keep(self, segments: Sequence[DeviceSegment], address: int) -> None:
        """Move the pages of adjacent segments away from `address`, if the kernel can, so that the
        caller may replace the mappings there."""
        nbytes = sum(segment.nbytes for segment in segments)
        if not nbytes:
            return
        parked = reserve_aligned(nbytes)
        end = parked + nbytes
        for segment in segments:
            try:
                move_pages(address, segment.nbytes, parked)
            except OSError:
                unmap(parked, end - parked)
                break
            file = _file(segment)
            if file in self._kept:
                # It was attached in between by a new mapping, which kept the arena's contents.
                self._drop(file)
            self._kept[file] = (parked, segment.nbytes)
            self.nbytes += segment.nbytes
            address, parked = address + segment.nbytes, parked + segment.nbytes
        while self.nbytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def restore(self, segment: DeviceSegment, address: int) -> bool:
        """Move a segment's kept mapping to `address`, replacing the mapping there; false: none was
        kept."""
        found = self._kept.pop(_file(segment), None)
        if found is None:
            return False
        parked, nbytes = found
        self.nbytes -= nbytes
        map_over(parked, nbytes, address)
        return True

    def clear(self) -> None:
        """Unmap all."""
        for file in list(self._kept):
            self._drop(file)

    def _drop(self, file: _File) -> None:
        parked, nbytes = self._kept.pop(file)
        self.nbytes -= nbytes
        unmap(parked, nbytes)


def _file(segment: DeviceSegment) -> _File:
    found = os.fstat(segment.fd)
    return found.st_dev, found.st_ino
