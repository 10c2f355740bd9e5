"""Leases: readers of versions in this daemon's store, whose bytes no move frees."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice

import numpy as np

from plexrl.errors import CorruptStateError
from plexrl.statemanager.bytes.data_plane import BLOCK_BYTES
from plexrl.statemanager.bytes.mapped_files import MappedData
from plexrl.statemanager.bytes.mapped_memory import Region
from plexrl.statemanager.bytes.strided_copy import copy_strided
from plexrl.statemanager.device.memory import WritableDevice
from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.layout.plan.columns import Bytes, Ints
from plexrl.statemanager.layout.strided.copies import StridedCopies, cut_at
from plexrl.statemanager.layout.versions import Manifest, digest_of, padded
from plexrl.statemanager.store.objects import SharedObject, Version
from plexrl.statemanager.store.receiving.reader import Arrived, Delta, HeldState
from plexrl.statemanager.store.saving.mover import Mover, ObjectPlacement
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.fault_points import FaultPoints
from plexrl.statemanager.store.tiers.host.pool import HostPool
from plexrl.statemanager.store.tiers.nvme import NvmeObjects, data_offset

BYTES_PER_S = 10e9
BLOCKS_KEPT = 8
"""Cached blocks of a version on NVMe: neighbouring copies mostly need the same block."""


class VersionLease(HeldState):
    """A `StateReader` whose objects stay in place until the lease ends: in memory, or read block by
    block from NVMe."""

    address = ""
    bytes_per_s = BYTES_PER_S
    request_s = 0.0
    arrives_whole = True

    def __init__(
        self,
        version: Version,
        tier: TierName,
        mover: Mover,
        pool: HostPool,
        nvme: NvmeObjects,
        faults: FaultPoints,
    ) -> None:
        super().__init__(version.manifest)
        self.tier = tier
        """Tier that the version is read from."""
        self._objects = version.objects
        self._mover = mover
        self._pool = pool
        self._nvme = nvme
        self._faults = faults
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Bytes] = OrderedDict()

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """File regions that hold the data, in order and complete.

        The descriptors are read-only and belong to the lease. Descriptors of NVMe files bypass the
        page cache, and the reader must verify what it reads through them.

        Raises:
            CorruptStateError: a file is missing.
        """
        return tuple(self._regions())

    @cached_property
    def mapped(self) -> MappedData | None:
        """As `StateReader.mapped`; absent if the version is not in the host tier."""
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

    def read(
        self,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,  # noqa: ARG002
    ) -> None:
        """As `VersionReader.read`, of all bytes."""
        if self.mapped is not None:
            self.mapped.read(copies, target)
        else:
            edges = self._edges
            cut, homes = cut_at(copies, edges[:, 0])
            for home in np.unique(homes).tolist():
                start, end = edges[home].tolist()
                copy_strided(
                    self._block(start, end), target, cut.chosen(homes == home).moved(-start)
                )
        if arrived is not None:
            arrived(copies, copies.nbytes)

    def confirm(self) -> None:
        """As `VersionReader.confirm`; the lease holds the version."""

    def block_digests(self) -> list[bytes]:
        """Block digests of each section. Raises as `digest`."""
        with describe_damage(self.manifest, self.tier):
            for found in self._objects:
                found.digests = self._mover.digests(found)
        return [found.digests for found in self._objects]

    def read_data(self, start: int, target: memoryview) -> None:
        """Fill `target` with the data from `start` on; data from NVMe is verified.

        Raises:
            CorruptStateError: the data is damaged.
        """
        end = start + len(target)
        done = start
        for section, found in zip(self.manifest.sections, self._objects, strict=True):
            first = max(start, section.start)
            last = min(end, section.start + section.nbytes)
            if first >= last:
                continue
            # The padding between two sections, less than a page, reads as zero.
            target[done - start : first - start] = bytes(first - done)
            with describe_damage(self.manifest, self.tier):
                part = target[first - start : last - start]
                self._mover.read(found, first - section.start, part)
            done = last
        target[done - start :] = bytes(end - done)

    @property
    def last_object(self) -> SharedObject:
        """The object of the last section."""
        return self._objects[-1]

    def load(self, memory: WritableDevice, *, without_last: bool = False) -> None:
        """Write the data, or all but its last section, to the manifest's extents in an arena.

        Raises:
            CorruptStateError: the data is damaged; the arena may hold parts of it.
            StateLostError: the arena no longer exists.
        """
        extents = ExtentMap(self.manifest.extents)
        count = len(self._objects) - without_last
        whole = zip(self.manifest.sections, self._objects, strict=True)
        for section, found in islice(whole, count):
            placed = ObjectPlacement(memory, extents, section.start)
            if self.tier == TierName.HOST:
                assert found.pieces is not None, "the lease references it there"
                self._mover.host_to_arena(found.pieces, placed)
            else:
                with describe_damage(self.manifest, self.tier):
                    self._mover.nvme_to_arena(found, placed)
            self._faults.reach("load.half")

    def digest(self) -> str:
        """Digest of the data; computed if it is not cached.

        Raises:
            CorruptStateError: the data is on NVMe and damaged.
        """
        return digest_of(self.block_digests())

    def close(self) -> None:
        """Close descriptors."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    @cached_property
    def _edges(self) -> Ints:
        """[block] (start, end) of the verified blocks; a section's blocks start at its start."""
        found = [
            (at, min(at + BLOCK_BYTES, section.start + section.nbytes))
            for section in self.manifest.sections
            for at in range(section.start, section.start + section.nbytes, BLOCK_BYTES)
        ]
        return np.array(found, dtype=np.int64).reshape(-1, 2)

    def _block(self, start: int, end: int) -> Bytes:
        with self._lock:
            block = self._blocks.get(start)
            if block is None:
                memory = bytearray(end - start)
                self.read_data(start, memoryview(memory))
                block = self._blocks[start] = np.frombuffer(memory, dtype=np.uint8)
                if len(self._blocks) > BLOCKS_KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(start)
            return block

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

    def _open(self, found: SharedObject) -> int:
        if found.id not in self._fds:
            with describe_damage(self.manifest, self.tier):
                try:
                    self._fds[found.id] = self._nvme.open(found.id)
                except OSError as error:
                    raise CorruptStateError(str(error)) from error
        return self._fds[found.id]


@contextmanager
def describe_damage(manifest: Manifest, tier: TierName) -> Iterator[None]:
    """Add the version's description to the error for a damaged object."""
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
