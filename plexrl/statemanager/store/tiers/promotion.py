"""Promotion of versions from NVMe to the host tier; the NVMe copy stays until it is evicted."""

from collections.abc import Iterable
from threading import Event

from plexrl.statemanager.layout.ranges import Piece
from plexrl.statemanager.layout.versions import (
    ObjectRecord,
    VersionRecord,
    encode_header,
    padded,
)
from plexrl.statemanager.store.objects import SharedObject, Version
from plexrl.statemanager.store.saving.mover import Mover
from plexrl.statemanager.store.saving.saving import PIECE_TEXT_BYTES
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.host.pool import HostPool
from plexrl.statemanager.store.tiers.tier import Tier
from plexrl.statemanager.store.tiers.tier_allocator import TierAllocator
from plexrl.statemanager.store.versions.catalog import Catalog

HOST = TierName.HOST


class Promoter:
    """Copies versions from NVMe to the host tier. The caller references them on NVMe.
    Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: dict[TierName, Tier],
        pool: HostPool,
        mover: Mover,
        allocator: TierAllocator,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._pool = pool
        self._mover = mover
        self._allocator = allocator

    def promote(self, version: Version) -> None:
        """Copy a version to host, evicting other versions if necessary.

        Raises:
            CorruptStateError: the version is damaged.
            StateTierFullError: the host tier has no space, even after eviction.
        """
        needed = self._needed_bytes(version)
        nvme_bytes = self._catalog.bytes_max[TierName.NVME] + 1
        self._allocator.reserve(version.manifest, needed, nvme_bytes, host_only=True)
        self._copy_to_host(version, needed, None)

    def promote_if_free(self, version: Version, cancelled: Event) -> bool:
        """Copy a version to host if it has free space; returns whether it had. Raises as `promote`,
        and OperationCancelledError."""
        needed = self._needed_bytes(version)
        if not self._allocator.try_reserve(HOST, needed):
            return False
        self._copy_to_host(version, needed, cancelled)
        return True

    def _needed_bytes(self, version: Version) -> int:
        # An estimate: a fragmented version has a longer header, for which `_copy_to_host` reserves.
        objects = dict.fromkeys(version.objects)
        pieces = 4 * len(objects) * PIECE_TEXT_BYTES
        header = padded(len(encode_header(version.record(TierName.NVME))) + pieces)
        with self._catalog.lock:
            return header + sum(o.bytes_in(HOST) for o in objects if not o.is_in(HOST))

    def _copy_to_host(self, version: Version, reserved: int, cancelled: Event | None) -> None:
        """Copy a version into reserved space."""
        catalog = self._catalog
        fetched: dict[SharedObject, tuple[Piece, ...]] = {}
        held: list[SharedObject] = []
        try:
            for found in dict.fromkeys(version.objects):
                with catalog.lock:
                    if found.is_in(HOST):
                        catalog.acquire([found], HOST)
                        held.append(found)
                        continue
                near = self._pool.node_of(version.manifest.shard)
                nbytes = found.bytes_in(HOST)
                fetched[found] = self._pool.alloc(nbytes, version.manifest.tenant, near)
            where = {**{found: found.pieces or () for found in held}, **fetched}
            record = VersionRecord(
                version.manifest,
                tuple(ObjectRecord(o.id, o.nbytes, where[o]) for o in version.objects),
            )
            header = len(encode_header(record))
            used = header + sum(found.bytes_in(HOST) for found in fetched)
            with catalog.lock:
                if used > reserved and not catalog.reserve(HOST, used - reserved):
                    raise catalog.full_error(version.manifest, used)
                reserved = max(reserved, used)
            for found, pieces in fetched.items():
                digests = self._mover.nvme_to_host(found, pieces, cancelled)
                found.digests = digests
            self._tiers[HOST].faults.reach("promote.data")
            if self._commit(version, fetched, record, header):
                reserved -= used
                fetched = {}
        finally:
            with catalog.lock:
                self._free(fetched.values())
                catalog.release(held, HOST)
                catalog.unreserve(HOST, reserved)

    def _commit(
        self,
        version: Version,
        fetched: dict[SharedObject, tuple[Piece, ...]],
        record: VersionRecord,
        header: int,
    ) -> bool:
        """Write the host header; returns False if the version was dropped or promoted meanwhile."""
        with self._catalog.lock:
            is_there = HOST in version.header_bytes or any(o.is_in(HOST) for o in fetched)
            if version.retired or is_there:
                return False
            # Under the lock: a version that is dropped now must not get a header.
            self._pool.reserve_other(header)
            try:
                self._tiers[HOST].write_header(record, "promote")
            except BaseException:
                self._pool.reserve_other(-header)
                raise
            for found, pieces in fetched.items():
                found.pieces = pieces
            self._catalog.add_header(version, HOST, header)
            return True

    def _free(self, pieces: Iterable[tuple[Piece, ...]]) -> None:
        for one in pieces:
            self._pool.free(one)
