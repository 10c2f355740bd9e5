"""Versions brought from NVMe to host; the copy on NVMe stays, and gives way when it must."""

from collections.abc import Iterable
from threading import Event

from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.eviction.tier_allocator import Rooms
from plexrl.statemanager.host.free_ranges import Piece
from plexrl.statemanager.host.pool import HostPool
from plexrl.statemanager.store.catalog import Catalog
from plexrl.statemanager.store.objects import StoredObject, Version
from plexrl.statemanager.store.saving import PIECE_TEXT_BYTES
from plexrl.statemanager.store.tier import Tier
from plexrl.statemanager.store.versions.versions import (
    ObjectRecord,
    VersionRecord,
    encode_header,
    padded,
)
from plexrl.statemanager.transfer.copy.mover import Mover

HOST = TierName.HOST


class Promoter:
    """Brings versions that are in use on NVMe to host. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: dict[TierName, Tier],
        pool: HostPool,
        mover: Mover,
        rooms: Rooms,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._pool = pool
        self._mover = mover
        self._rooms = rooms

    def promote(self, version: Version) -> None:
        """Bring a version to host, whatever has to be spilled for it.

        Raises:
            CorruptStateError: it is damaged.
            StateTierFullError: the host tier cannot take it.
        """
        needed = self._needed(version)
        nvme_bytes = self._catalog.bytes_max[TierName.NVME] + 1
        self._rooms.make(version.manifest, needed, nvme_bytes, host_only=True)
        self._bring(version, needed, None)

    def promote_if_free(self, version: Version, cancelled: Event) -> bool:
        """Bring a version to host if there is room already; returns whether it is there. Raises as
        `promote`, and OperationCancelledError."""
        needed = self._needed(version)
        if not self._rooms.take_free(HOST, needed):
            return False
        self._bring(version, needed, cancelled)
        return True

    def _needed(self, version: Version) -> int:
        # A version that lies scattered has a longer header; then this was a guess, and put right.
        objects = dict.fromkeys(version.objects)
        pieces = 4 * len(objects) * PIECE_TEXT_BYTES
        header = padded(len(encode_header(version.record(TierName.NVME))) + pieces)
        with self._catalog.lock:
            return header + sum(o.bytes_in(HOST) for o in objects if not o.is_in(HOST))

    def _bring(self, version: Version, reserved: int, cancelled: Event | None) -> None:
        """Bring a version to the room that is reserved for it."""
        catalog = self._catalog
        fetched: dict[StoredObject, tuple[Piece, ...]] = {}
        held: list[StoredObject] = []
        try:
            for found in dict.fromkeys(version.objects):
                with catalog.lock:
                    if found.is_in(HOST):
                        catalog.acquire([found], HOST)
                        held.append(found)
                        continue
                fetched[found] = self._pool.alloc(found.bytes_in(HOST), version.manifest.tenant)
            where = {**{found: found.pieces or () for found in held}, **fetched}
            record = VersionRecord(
                version.manifest,
                tuple(ObjectRecord(o.id, o.nbytes, where[o]) for o in version.objects),
            )
            header = len(encode_header(record))
            used = header + sum(found.bytes_in(HOST) for found in fetched)
            with catalog.lock:
                if used > reserved and not catalog.reserve(HOST, used - reserved):
                    raise catalog.full(version.manifest, used)
                reserved = max(reserved, used)
            for found, pieces in fetched.items():
                digests = self._mover.nvme_to_host(found, pieces, cancelled)
                found.digests = digests
            self._tiers[HOST].faults.reach("promote.data")
            if self._settle(version, fetched, record, header):
                reserved -= used
                fetched = {}
        finally:
            with catalog.lock:
                self._free(fetched.values())
                catalog.release(held, HOST)
                catalog.give_back(HOST, reserved)

    def _settle(
        self,
        version: Version,
        fetched: dict[StoredObject, tuple[Piece, ...]],
        record: VersionRecord,
        header: int,
    ) -> bool:
        """Name the version in host, unless somebody else did, or dropped it, meanwhile."""
        with self._catalog.lock:
            is_there = HOST in version.header_bytes or any(o.is_in(HOST) for o in fetched)
            if version.retired or is_there:
                return False
            # Named under the lock: a version that is dropped now must not come back by this name.
            self._pool.set_aside(header)
            try:
                self._tiers[HOST].name_version(record, "promote")
            except BaseException:
                self._pool.set_aside(-header)
                raise
            for found, pieces in fetched.items():
                found.pieces = pieces
            self._catalog.named(version, HOST, header)
            return True

    def _free(self, pieces: Iterable[tuple[Piece, ...]]) -> None:
        for one in pieces:
            self._pool.free(one)
