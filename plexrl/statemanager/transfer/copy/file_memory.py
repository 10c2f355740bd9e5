"""Regions of another process's files as memory, read and written by system calls.

This takes twice as long as a mapping, but is safe if the owner truncates the file: a read fails,
while access to a mapping would kill the process.
"""

import ctypes
import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from plexrl.errors import CorruptStateError, InvalidRequestError, PlexRLError
from plexrl.statemanager.device.memory import Run
from plexrl.statemanager.store.tiers.nvme import use_cache
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES, Region


class FileMemory:
    """Regions, in order of the data, as one memory. The caller owns their descriptors."""

    def __init__(self, regions: Sequence[Region], ended: Callable[[int], PlexRLError]) -> None:
        """`ended` makes the error for an offset beyond the end of a file."""
        self._regions = regions
        self._starts = [region.data_offset for region in regions]
        self._ended = ended
        self.nbytes = max((r.data_offset + r.nbytes for r in regions), default=0)

    def read(self, runs: Sequence[Run]) -> None:
        """As `DeviceMemory.read`. Raises the error of `ended` if a file is too short."""
        for run in runs:
            for region, offset, address, nbytes in self._parts(run):
                self._move(os.preadv, region, offset, address, nbytes)

    def write(self, runs: Sequence[Run]) -> None:
        """As `DeviceMemory.write`."""
        for run in runs:
            for region, offset, address, nbytes in self._parts(run):
                self._move(os.pwritev, region, offset, address, nbytes)

    def _parts(self, run: Run) -> Iterator[tuple[Region, int, int, int]]:
        """(region, offset in it, address, bytes) of each region's part of a run."""
        done = 0
        while done < run.nbytes:
            at = run.offset + done
            index = bisect_right(self._starts, at) - 1
            inside = at - self._starts[index] if index >= 0 else 0
            left = self._regions[index].nbytes - inside if index >= 0 else 0
            if left <= 0:
                raise self._ended(at)
            nbytes = min(left, run.nbytes - done)
            yield self._regions[index], inside, run.address + done, nbytes
            done += nbytes

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        region: Region,
        inside: int,
        address: int,
        nbytes: int,
    ) -> None:
        view = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        done = 0
        while done < nbytes:
            left = nbytes - done
            # The last, partial page is separate, so that the others can bypass the page cache.
            part = view[done : done + (left - left % PAGE_BYTES or left)]
            try:
                count = move(region.fd, [part], region.offset + inside + done)
            except OSError as error:
                # A descriptor that bypasses the cache accepts only whole pages.
                if error.errno != errno.EINVAL or not use_cache(region.fd):
                    raise
                continue
            if count == 0:
                raise self._ended(region.data_offset + inside + done)
            done += count


def version_memory(regions: Sequence[Region], description: str) -> FileMemory:
    """A version's data in files of another process."""

    def ended(at: int) -> PlexRLError:
        return CorruptStateError(
            f"{description} is damaged at its source (its data ends after {at} bytes): restore a "
            "checkpoint"
        )

    for region in regions:
        if region.offset < 0 or region.nbytes < 1 or region.offset % PAGE_BYTES:
            raise InvalidRequestError(
                f"{description} has a region at the invalid offset {region.offset}"
            )
    return FileMemory(regions, ended)
