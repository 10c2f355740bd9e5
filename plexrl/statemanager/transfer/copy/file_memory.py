"""Memory behind descriptors, moved by the kernel: regions of another's files.

Slower than a mapping by half, and safe where the owner may cut the file short: that ends a read,
while it would end the process that touches the mapping.
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
    """Some regions, in the order of the data, as one memory; their descriptors are the caller's."""

    def __init__(self, regions: Sequence[Region], ended: Callable[[int], PlexRLError]) -> None:
        """`ended` makes the error for when what should be at a place is not there."""
        self._regions = regions
        self._starts = [region.data_offset for region in regions]
        self._ended = ended
        self.nbytes = max((r.data_offset + r.nbytes for r in regions), default=0)

    def read(self, runs: Sequence[Run]) -> None:
        """As `DeviceMemory.read`. Raises what `ended` makes: a file is too short."""
        for run in runs:
            for region, offset, address, nbytes in self._parts(run):
                self._move(os.preadv, region, offset, address, nbytes)

    def write(self, runs: Sequence[Run]) -> None:
        """As `DeviceMemory.write`."""
        for run in runs:
            for region, offset, address, nbytes in self._parts(run):
                self._move(os.pwritev, region, offset, address, nbytes)

    def _parts(self, run: Run) -> Iterator[tuple[Region, int, int, int]]:
        """(region, place in it, address, bytes) of each region's share of a run."""
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
            # A file's last page by itself: the others can be moved past the page cache.
            part = view[done : done + (left - left % PAGE_BYTES or left)]
            try:
                count = move(region.fd, [part], region.offset + inside + done)
            except OSError as error:
                # A descriptor that bypasses the cache takes whole pages only.
                if error.errno != errno.EINVAL or not use_cache(region.fd):
                    raise
                continue
            if count == 0:
                raise self._ended(region.data_offset + inside + done)
            done += count


def version_memory(regions: Sequence[Region], description: str) -> FileMemory:
    """A version's data in files that are another's."""

    def ended(at: int) -> PlexRLError:
        return CorruptStateError(
            f"{description} is damaged where it comes from (its data ends after {at} bytes): "
            "restore a checkpoint"
        )

    for region in regions:
        if region.offset < 0 or region.nbytes < 1 or region.offset % PAGE_BYTES:
            raise InvalidRequestError(f"{description} is said to lie at {region.offset}")
    return FileMemory(regions, ended)
