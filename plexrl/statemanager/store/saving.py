"""A version on its way into the store: shared where another rank has the same bytes, else copied.

A section that other ranks hold too is stored once. Who comes first claims it and writes it; who
comes later waits for that, compares its own bytes with what was written, and shares it if they are
equal. All claims of a version are made at once, and whoever waits waits for earlier claims only, so
no two wait for each other.
"""

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from plexrl.errors import CorruptStateError, StateTierFullError
from plexrl.statemanager.device.memory import DeviceMemory
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.eviction.tier_allocator import Rooms
from plexrl.statemanager.fault_points import FaultPoints
from plexrl.statemanager.host.free_ranges import Piece
from plexrl.statemanager.host.pool import HostPool
from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.store.catalog import Catalog
from plexrl.statemanager.store.nvme import file_bytes
from plexrl.statemanager.store.objects import ObjectState, StoredObject, Version, share_keys
from plexrl.statemanager.store.tier import Tier
from plexrl.statemanager.store.versions.versions import (
    Extent,
    Manifest,
    Section,
    digest_of,
    header_bytes,
    padded,
)
from plexrl.statemanager.transfer.copy.mover import Mover, Placed

LOG = logging.getLogger(__name__)

HOST, NVME = TierName.HOST, TierName.NVME
PIECE_TEXT_BYTES = 64
"""What a header spends on naming a piece, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A section whose bytes are in the host tier already, so they need not be copied there."""

    section: int
    """Its index."""
    piece: Piece | None = None
    """Where they are; the version takes this over if it comes to lie in host."""
    taken: Callable[[StoredObject], None] | None = None
    """Told of it then, under the catalog's lock."""
    found: StoredObject | None = None
    """The object that they are, held in place by whoever gives it."""


@dataclass(slots=True, eq=False)
class _Draft:
    """A version as far as it has come."""

    manifest: Manifest
    placed: list[Placed]
    objects: list[StoredObject]
    """One for each section: its own, or another rank's."""
    own: set[StoredObject] = field(default_factory=set)
    """To be written."""
    others: set[StoredObject] = field(default_factory=set)
    """Another rank's, held in place in `held`."""
    held: list[tuple[StoredObject, TierName]] = field(default_factory=list)

    given: dict[StoredObject, Piece] = field(default_factory=dict)
    """Own objects that are in host already."""
    manifest_bytes: int = 0
    """Of the manifest as text."""

    def version(self) -> Version:
        """What it will be."""
        ordinal = self.manifest.ordinal
        return Version(self.manifest, tuple(self.objects), last_use=ordinal, last_use_s=0.0)

    def header_bytes(self, tier: TierName) -> int:
        """Of its header in a tier, as far as it is known where the objects lie."""
        records = [found.record(tier) for found in self.objects]
        return header_bytes(self.manifest_bytes, records)

    def replace(self, index: int) -> StoredObject:
        """Have an own object for a section instead of another rank's."""
        own = new_object(self.manifest, self.manifest.sections[index])
        self.others.discard(self.objects[index])
        self.own.add(own)
        self.objects[index] = own
        return own

    def lacking(self, tier: TierName) -> set[StoredObject]:
        """What is to be written to bring it all to a tier."""
        return self.own | {found for found in self.others if not found.is_in(tier)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTally:
    """Sections that another rank was said to have too: how many it had, and which it had not."""

    shared: int = 0
    shared_bytes: int = 0
    """Not stored again."""
    different: int = 0
    """Stored apart: the ranks are not the replicas they are taken for."""


class Saver:
    """Stores versions. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: dict[TierName, Tier],
        pool: HostPool,
        mover: Mover,
        rooms: Rooms,
        faults: FaultPoints,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._pool = pool
        self._mover = mover
        self._rooms = rooms
        self._faults = faults
        self.replicas = ReplicaTally()
        """Replaced under the catalog's lock."""

    def save(
        self,
        manifest: Manifest,
        memory: DeviceMemory,
        extents: Sequence[Extent],
        superseded: Iterable[str],
        *,
        host_allowed: bool,
        digest_wanted: str | None = None,
        given: Given | None = None,
    ) -> Version:
        """Store a version whose data lies in `memory` where `extents` say.

        Raises:
            StateTierFullError: no tier has room, whatever is moved.
            CorruptStateError: the data is not that of `digest_wanted`.
        """
        draft = self._claim(manifest, memory, extents, given)
        self._faults.reach("put.claimed")
        try:
            for index, found in enumerate(draft.objects):
                if found in draft.others and (given is None or found is not given.found):
                    self._share_or_copy(draft, index)
            tier, header = self._write_somewhere(draft, superseded, host_allowed=host_allowed)
            self._faults.reach("put.copied")
            try:
                self._check_digest(draft, digest_wanted)
                version = draft.version()
                self._tiers[tier].name_version(version.record(tier), "put")
            except BaseException:
                with self._catalog.lock:
                    self._give_header_back(tier, header)
                raise
            with self._catalog.lock:
                self._catalog.install(version)
                self._catalog.named(version, tier, header)
                version.last_use_s = self._rooms.now()
                if tier == HOST and given is not None and given.taken is not None:
                    given.taken(draft.objects[given.section])
            self._faults.reach("put.dropped")
            return version
        except BaseException:
            with self._catalog.lock:
                for found in draft.given:
                    # It is its giver's again.
                    found.pieces = None
                for found in draft.own:
                    if found.state == ObjectState.PENDING:
                        self._catalog.settle(found, ObjectState.FAILED)
            raise
        finally:
            with self._catalog.lock:
                for found, tier in draft.held:
                    self._catalog.release([found], tier)

    def _claim(
        self,
        manifest: Manifest,
        memory: DeviceMemory,
        extents: Sequence[Extent],
        given: Given | None,
    ) -> _Draft:
        catalog = self._catalog
        places = ExtentMap(extents)
        draft = _Draft(manifest, [], [])
        draft.manifest_bytes = len(msgspec.json.encode(manifest))
        with catalog.lock:
            keys = share_keys(manifest)
            for index, (section, key) in enumerate(zip(manifest.sections, keys, strict=True)):
                draft.placed.append(Placed(memory, places, section.start))
                if given is not None and given.section == index:
                    draft.objects.append(self._take(draft, given, section))
                    continue
                found = catalog.shared.get(key) if key is not None else None
                if found is not None and found in draft.own:
                    # One version says twice that it has it; it must not wait for itself.
                    found, key = None, None
                if found is not None:
                    draft.others.add(found)
                else:
                    found = new_object(manifest, section)
                    found.share_key = key
                    draft.own.add(found)
                    if key is not None:
                        catalog.shared[key] = found
                draft.objects.append(found)
        return draft

    def _take(self, draft: _Draft, given: Given, section: Section) -> StoredObject:
        """The object of a given section; the catalog's lock is held."""
        if given.found is not None:
            self._catalog.acquire([given.found], HOST)
            draft.held.append((given.found, HOST))
            draft.others.add(given.found)
            return given.found
        found = new_object(draft.manifest, section)
        assert given.piece is not None
        assert given.piece.nbytes == padded(section.nbytes), "a loan is as long as its section"
        draft.given[found] = given.piece
        draft.own.add(found)
        return found

    def _share_or_copy(self, draft: _Draft, index: int) -> None:
        """Hold another rank's object in place, or have an own one written where it is not equal."""
        found = draft.objects[index]
        catalog = self._catalog
        with catalog.lock:
            catalog.whole.wait_for(lambda: found.state != ObjectState.PENDING)
            tiers = [tier for tier in TierName if found.is_in(tier)]
            for tier in tiers:
                catalog.acquire([found], tier)
                draft.held.append((found, tier))
        if tiers:
            try:
                is_same = self._mover.is_same(found, draft.placed[index])
                self._count_replica(found, is_same=is_same)
                if is_same:
                    return
                LOG.warning(
                    "%s differs from what another rank calls its replica; it is stored apart",
                    draft.manifest.description,
                )
            except CorruptStateError as error:
                LOG.warning("%s shares nothing: %s", draft.manifest.description, error)
        draft.replace(index)

    def _count_replica(self, found: StoredObject, *, is_same: bool) -> None:
        with self._catalog.lock:
            known = self.replicas
            if is_same:
                shared_bytes = known.shared_bytes + found.nbytes
                known = replace(known, shared=known.shared + 1, shared_bytes=shared_bytes)
            else:
                known = replace(known, different=known.different + 1)
            self.replicas = known

    def _write_somewhere(
        self, draft: _Draft, superseded: Iterable[str], *, host_allowed: bool
    ) -> tuple[TierName, int]:
        """Bring what is lacking to a tier that has room; returns it, and the bytes of the header,
        which stay reserved there."""
        extra_bytes = nvme_extra_bytes = 0
        while True:
            nvme_bytes = self._needed(draft, NVME, nvme_extra_bytes)
            if not host_allowed:
                tier, reserved = NVME, self._reserve_on_nvme(draft, nvme_bytes, superseded)
            else:
                reserved = self._needed(draft, HOST, extra_bytes)
                tier = self._rooms.make(draft.manifest, reserved, nvme_bytes, superseded)
                reserved = reserved if tier == HOST else nvme_bytes
            self._faults.reach("put.reserved")
            try:
                return tier, self._write(draft, tier, reserved)
            except _RoomTooSmallError as error:
                if tier == HOST:
                    extra_bytes += error.by_bytes
                else:
                    nvme_extra_bytes += error.by_bytes
            except StateTierFullError:
                if tier == NVME:
                    raise
                # The memory file system is fuller than our bound; others may be using it.
                host_allowed = False

    def _reserve_on_nvme(self, draft: _Draft, nbytes: int, superseded: Iterable[str]) -> int:
        if not self._rooms.take_free(NVME, nbytes):
            with self._catalog.lock:
                self._catalog.drop({*superseded, *self._rooms.only_while_room()})
                if not self._catalog.reserve(NVME, nbytes):
                    raise self._catalog.full(draft.manifest, nbytes)
        return nbytes

    def _needed(self, draft: _Draft, tier: TierName, extra_bytes: int = 0) -> int:
        """Bytes of what is lacking in a tier, and of the header there."""
        # What is not there yet is counted with a few pieces; a scattered one has more.
        expected = 0 if tier == NVME else 2 * len(draft.objects) * PIECE_TEXT_BYTES
        header = padded(draft.header_bytes(tier) + expected + extra_bytes)
        return header + sum(found.bytes_in(tier) for found in self._to_reserve(draft, tier))

    def _to_reserve(self, draft: _Draft, tier: TierName) -> set[StoredObject]:
        """What takes room in a tier that it has not yet."""
        return draft.lacking(tier) - (draft.given.keys() if tier == HOST else set())

    def _write(self, draft: _Draft, tier: TierName, reserved: int) -> int:
        """Write what is lacking; returns the bytes of the header.

        The reservation is kept as far as these take it, and undone where this raises.
        """
        catalog = self._catalog
        written: dict[StoredObject, Placed] = {}
        try:
            with catalog.lock:
                lacking = draft.lacking(tier)
                # One that was brought here since it was compared may leave again.
                brought = draft.others - lacking - {o for o, held in draft.held if held == tier}
                catalog.acquire(brought, tier)
                draft.held += [(found, tier) for found in brought]
            for index, found in enumerate(draft.objects):
                if found not in lacking:
                    continue
                if found in draft.others:
                    # It lies in the other tier only, so this version has one of its own here.
                    found = draft.replace(index)
                written[found] = draft.placed[index]
                if tier == HOST and found in draft.given:
                    found.pieces = (draft.given[found],)
                elif tier == HOST:
                    found.pieces = self._pool.alloc(found.bytes_in(HOST), draft.manifest.tenant)
            header = draft.header_bytes(tier)
            copied = {
                o: placed for o, placed in written.items() if tier != HOST or o not in draft.given
            }
            used = header + sum(found.bytes_in(tier) for found in copied)
            if used > reserved:
                raise _RoomTooSmallError(used - reserved)
            for found, placed in copied.items():
                if tier == HOST:
                    assert found.pieces is not None
                    self._mover.arena_to_host(placed, found.pieces)
                else:
                    found.digests = self._mover.arena_to_nvme(placed, found)
                    found.on_nvme = True
        except BaseException:
            with catalog.lock:
                for found in written:
                    if tier == HOST and found in draft.given:
                        found.pieces = None
                    catalog.abandon(found, tier)
                catalog.give_back(tier, reserved)
            raise
        if tier == HOST:
            self._pool.set_aside(header)
        with catalog.lock:
            catalog.give_back(tier, reserved - used)
            catalog.acquire(written, tier)
            draft.held += [(found, tier) for found in written]
            for found in written:
                catalog.settle(found, ObjectState.WHOLE)
        return header

    def _give_header_back(self, tier: TierName, header: int) -> None:
        self._catalog.give_back(tier, header)
        if tier == HOST:
            self._pool.set_aside(-header)

    def _check_digest(self, draft: _Draft, wanted: str | None) -> None:
        if wanted is None:
            return
        for found in draft.objects:
            found.digests = self._mover.digests(found)
        if digest_of(found.digests for found in draft.objects) != wanted:
            manifest = draft.manifest
            raise CorruptStateError(
                f"{manifest.description} arrived damaged (its digest does not match): restore a "
                "checkpoint",
                deployment=manifest.deployment,
                rank=manifest.rank,
                seq=manifest.seq,
            )


class _RoomTooSmallError(Exception):
    """The room that was reserved does not do, as the version lies more scattered than expected, or
    has a copy of what it was to share."""

    def __init__(self, by_bytes: int) -> None:
        super().__init__(f"{by_bytes} bytes more are needed")
        self.by_bytes = by_bytes


def new_object(manifest: Manifest, section: Section) -> StoredObject:
    """One that is to be written."""
    # Unique also beside an object of a version that no longer is, whose file is still read.
    name = f"{manifest.file_name}.{uuid.uuid4().hex[:12]}"
    return StoredObject(id=name, nbytes=section.nbytes, file_bytes=file_bytes(name, section.nbytes))
