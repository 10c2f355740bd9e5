"""Cache of read-only mappings of other processes' files, since mapping costs as much as copying."""

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plexrl.statemanager.bytes.mapped_memory import Region, populate_for_reading
from plexrl.statemanager.bytes.strided_copy import Job, copy_strided
from plexrl.statemanager.layout.plan.columns import Bytes, Ints
from plexrl.statemanager.layout.ranges import PAGE_BYTES
from plexrl.statemanager.layout.strided.copies import StridedCopies, cut_at


class MappedFiles:
    """Read-only mappings by file. A file that has grown is mapped again. One thread at a time."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], Bytes] = {}
        self._populated: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
        """By file, whether each page was populated, to save a system call."""
        self._used: set[tuple[int, int]] = set()

    def of(self, regions: Sequence[Region]) -> dict[int, Bytes]:
        """The mapping of the file behind each descriptor in the regions. The caller may close the
        descriptors afterwards.

        Raises:
            OSError: it cannot be mapped.
        """
        files: dict[int, Bytes] = {}
        populated: dict[int, npt.NDArray[np.bool_]] = {}
        for region in regions:
            if region.fd not in files:
                file = self._mapped(region.fd)
                files[region.fd], populated[region.fd] = self._maps[file], self._populated[file]
            # Populate only the region: a page of a sparse file takes memory once it is touched.
            first = region.offset // PAGE_BYTES
            pages = populated[region.fd][first : -(-(region.offset + region.nbytes) // PAGE_BYTES)]
            if not pages.all():
                address = files[region.fd].ctypes.data + region.offset
                populate_for_reading(address, region.nbytes)
                pages[:] = True
        return files

    def _mapped(self, fd: int) -> tuple[int, int]:
        status = os.fstat(fd)
        # A mapped file keeps its inode number, so no other file can have the same key.
        file = (status.st_dev, status.st_ino)
        self._used.add(file)
        known = self._maps.get(file)
        if known is None or len(known) < status.st_size:
            mapped = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
            self._maps[file] = np.frombuffer(mapped, dtype=np.uint8)
            self._populated[file] = np.zeros(-(-status.st_size // PAGE_BYTES), dtype=np.bool_)
        return file

    def forget_unused(self) -> None:
        """Unmap files that were not used since the last call; their owner may have removed them."""
        self._maps = {file: self._maps[file] for file in self._used if file in self._maps}
        self._populated = {file: self._populated[file] for file in self._maps}
        self._used = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedData:
    """A version's data, mapped region by region."""

    starts: Ints
    """[region] offset in the data, ascending."""
    pieces: tuple[Bytes, ...]
    """The mapped bytes of each region."""

    @classmethod
    def of(cls, regions: Sequence[Region], files: Mapping[int, Bytes]) -> "MappedData":
        """The data of regions whose `fd` is a key of `files`.

        Raises:
            ValueError: a region does not lie within its file.
        """
        in_order = sorted(regions, key=lambda region: region.data_offset)
        pieces = []
        for region in in_order:
            piece = files[region.fd][region.offset : region.offset + region.nbytes]
            if len(piece) != region.nbytes:
                raise ValueError(f"{region} does not lie within its file")
            pieces.append(piece)
        starts = np.array([region.data_offset for region in in_order], dtype=np.int64)
        return cls(starts=starts, pieces=tuple(pieces))

    def read(self, copies: StridedCopies, target: Bytes) -> None:
        """Perform copies from the data to `target`, on this thread."""
        for memory, job in self.jobs(copies):
            copy_strided(memory, target, job)

    def jobs(self, copies: StridedCopies) -> list[Job]:
        """The copies by region, with offsets from the start of each."""
        if not len(copies):
            return []
        if len(self.pieces) == 1 and self.starts[0] == 0:
            return [(self.pieces[0], copies)]
        cut, homes = cut_at(copies, self.starts)
        order = np.argsort(homes, kind="stable")
        cut, homes = cut.chosen(order), homes[order]
        jobs = []
        for home in np.unique(homes).tolist():
            first, last = np.searchsorted(homes, [home, home + 1]).tolist()
            mine = cut.chosen(slice(first, last))
            jobs.append((self.pieces[home], mine.moved(-int(self.starts[home]))))
        return jobs
