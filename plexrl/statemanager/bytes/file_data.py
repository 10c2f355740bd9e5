"""A version's data in files of another process, read by system calls.

This takes twice as long as a mapping, but is safe if the owner truncates the file: a read fails,
while access to a mapping would kill the process.
"""

import os
from collections.abc import Sequence

from plexrl.errors import CorruptStateError, InvalidRequestError
from plexrl.statemanager.bytes.direct_io import transfer
from plexrl.statemanager.bytes.mapped_memory import Region, parts_of
from plexrl.statemanager.layout.ranges import PAGE_BYTES


class FileData:
    """Regions, in order of the data. The caller owns their descriptors."""

    def __init__(self, regions: Sequence[Region], description: str) -> None:
        """`description` names the version in messages.

        Raises:
            InvalidRequestError: a region does not begin at a page.
        """
        for region in regions:
            if region.offset < 0 or region.nbytes < 1 or region.offset % PAGE_BYTES:
                raise InvalidRequestError(
                    f"{description} has a region at the invalid offset {region.offset}"
                )
        self._regions = regions
        self._description = description

    def read_data(self, start: int, target: memoryview) -> None:
        """Fill `target` with the data from offset `start` on.

        Raises:
            CorruptStateError: a file is too short.
        """
        done = 0
        for index, inside, nbytes in parts_of(self._regions, start, len(target)):
            region, part = self._regions[index], target[done : done + nbytes]
            _fill(region.fd, region.offset + inside, part, self._description)
            done += nbytes
        if done < len(target):
            raise _ended(self._description, start + done)


def _fill(fd: int, offset: int, target: memoryview, description: str) -> None:
    # The last, partial page is separate, so that the others can bypass the page cache.
    whole = len(target) // PAGE_BYTES * PAGE_BYTES
    done = transfer(os.preadv, fd, [target[:whole]], offset) if whole else 0
    if done == whole < len(target):
        done += transfer(os.preadv, fd, [target[whole:]], offset + whole)
    if done < len(target):
        raise _ended(description, offset + done)


def _ended(description: str, at: int) -> CorruptStateError:
    return CorruptStateError(
        f"{description} is damaged at its source (its data ends after {at} bytes): restore a "
        "checkpoint"
    )
