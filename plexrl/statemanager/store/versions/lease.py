"""A version that its user can read for as long as the lease lasts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from plexrl.errors import CorruptStateError
from plexrl.statemanager.device.memory import DeviceMemory
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.fault_points import FaultPoints
from plexrl.statemanager.host.pool import HostPool
from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.store.nvme import NvmeObjects, data_offset
from plexrl.statemanager.store.objects import StoredObject, Version
from plexrl.statemanager.store.versions.versions import Manifest, digest_of, padded
from plexrl.statemanager.transfer.copy.mapped_memory import Region
from plexrl.statemanager.transfer.copy.mover import Mover, Placed
from plexrl.statemanager.transfer.transport.mapped_files import MappedData

if TYPE_CHECKING:
    from plexrl.statemanager.transfer.copy.strided_copy import Bytes


class Lease:
    """Bytes of a version that no move takes away meanwhile."""

    def __init__(
        self,
        version: Version,
        tier: TierName,
        mover: Mover,
        pool: HostPool,
        nvme: NvmeObjects,
        faults: FaultPoints,
    ) -> None:
        self.manifest = version.manifest
        self.tier = tier
        """Where it is read from."""
        self._objects = version.objects
        self._mover = mover
        self._pool = pool
        self._nvme = nvme
        self._faults = faults
        self._fds: dict[str, int] = {}

    @property
    def regions(self) -> tuple[Region, ...]:
        """Where its data lies in files, in the order of the data, all of it covered.

        The descriptors are read-only and the lease's own. Those of NVMe files bypass the page
        cache, and what is read through them has to be verified by whoever reads.

        Raises:
            CorruptStateError: a file is gone.
        """
        return tuple(self._regions())

    def mapped(self) -> MappedData | None:
        """Its data in this process's memory; absent where it is not in the host tier."""
        if self.tier != TierName.HOST:
            return None
        starts: list[int] = []
        views: list[Bytes] = []
        for section, found in zip(self.manifest.sections, self._objects, strict=True):
            start = section.start
            for piece in found.pieces or ():
                starts.append(start)
                views.append(np.frombuffer(self._pool.view(piece), dtype=np.uint8))
                start += piece.nbytes
        return MappedData(starts=np.array(starts, dtype=np.int64), pieces=tuple(views))

    def block_digests(self) -> list[bytes]:
        """Of each section, those of its blocks. Raises as `digest`."""
        with damage_named(self.manifest, self.tier):
            for found in self._objects:
                found.digests = self._mover.digests(found)
        return [found.digests for found in self._objects]

    def read_data(self, start: int, target: memoryview) -> None:
        """Fill `target` with the data from `start` on, verified where it comes from NVMe.

        Raises:
            CorruptStateError: it is damaged.
        """
        end = start + len(target)
        done = start
        for section, found in zip(self.manifest.sections, self._objects, strict=True):
            first = max(start, section.start)
            last = min(end, section.start + section.nbytes)
            if first >= last:
                continue
            # Between two sections there is nothing, up to a page.
            target[done - start : first - start] = bytes(first - done)
            with damage_named(self.manifest, self.tier):
                part = target[first - start : last - start]
                self._mover.read(found, first - section.start, part)
            done = last
        target[done - start :] = bytes(end - done)

    @property
    def last(self) -> StoredObject:
        """The object of the last section."""
        return self._objects[-1]

    def load(self, memory: DeviceMemory, *, without_last: bool = False) -> None:
        """Write the data, or all but its last section, to where the manifest's extents lie in an
        arena.

        Raises:
            CorruptStateError: it is damaged; the arena holds some of it.
            StateLostError: the arena is gone.
        """
        extents = ExtentMap(self.manifest.extents)
        count = len(self._objects) - without_last
        whole = zip(self.manifest.sections, self._objects, strict=True)
        for section, found in islice(whole, count):
            placed = Placed(memory, extents, section.start)
            if self.tier == TierName.HOST:
                assert found.pieces is not None, "the lease holds it there"
                self._mover.host_to_arena(found.pieces, placed)
            else:
                with damage_named(self.manifest, self.tier):
                    self._mover.nvme_to_arena(found, placed)
            self._faults.reach("load.half")

    def digest(self) -> str:
        """Of the data; worked out anew where it never had to be known.

        Raises:
            CorruptStateError: it is on NVMe and damaged.
        """
        return digest_of(self.block_digests())

    def close(self) -> None:
        """Close descriptors."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _regions(self) -> Iterator[Region]:
        for section, found in zip(self.manifest.sections, self._objects, strict=True):
            if self.tier == TierName.NVME:
                yield Region(
                    fd=self._open(found),
                    offset=data_offset(found.id, found.nbytes),
                    nbytes=padded(found.nbytes),
                    data_offset=section.start,
                )
                continue
            start = section.start
            for piece in found.pieces or ():
                fd = self._pool.descriptor(piece.segment)
                yield Region(fd=fd, offset=piece.offset, nbytes=piece.nbytes, data_offset=start)
                start += piece.nbytes

    def _open(self, found: StoredObject) -> int:
        if found.id not in self._fds:
            with damage_named(self.manifest, self.tier):
                try:
                    self._fds[found.id] = self._nvme.open(found.id)
                except OSError as error:
                    raise CorruptStateError(str(error)) from error
        return self._fds[found.id]


@contextmanager
def damage_named(manifest: Manifest, tier: TierName) -> Iterator[None]:
    """Say of which version it is when an object turns out to be damaged."""
    try:
        yield
    except CorruptStateError as error:
        raise CorruptStateError(
            f"{manifest.description} in the {tier} tier is damaged ({error.message}): restore a "
            "checkpoint",
            deployment=manifest.deployment,
            rank=manifest.rank,
            seq=manifest.seq,
        ) from error
