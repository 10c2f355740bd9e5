"""Saving of versions. Sections that several ranks hold are stored once.

The first rank to save a replicated section claims its share key and writes the object. A later rank
waits for the object, compares its own bytes with it, and shares the object if the bytes are equal.
If both ranks computed digests on their devices, these are compared, and the later rank's bytes stay
there.

A version makes all its claims at once and waits only for earlier claims, so there is no deadlock.
"""

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from plexrl.errors import CorruptStateError, StateTierFullError
from plexrl.statemanager.device.memory import WritableDevice
from plexrl.statemanager.layout.layout import ExtentMap
from plexrl.statemanager.layout.ranges import Piece
from plexrl.statemanager.layout.versions import (
    Extent,
    Manifest,
    Section,
    digest_of,
    header_bytes,
    padded,
)
from plexrl.statemanager.store.objects import ObjectState, SharedObject, Version, share_keys
from plexrl.statemanager.store.saving.mover import Mover, ObjectPlacement
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.fault_points import FaultPoints
from plexrl.statemanager.store.tiers.host.pool import HostPool
from plexrl.statemanager.store.tiers.nvme import file_bytes
from plexrl.statemanager.store.tiers.tier import Tier
from plexrl.statemanager.store.tiers.tier_allocator import TierAllocator
from plexrl.statemanager.store.versions.catalog import Catalog

LOG = logging.getLogger(__name__)

HOST, NVME = TierName.HOST, TierName.NVME
PIECE_TEXT_BYTES = 64
"""Upper bound of a piece's size in a header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DonatedSection:
    """A section whose bytes already are in the host tier and need no copy."""

    section: int
    """Index of the section."""
    piece: Piece | None = None
    """Location of the bytes; the version takes the piece over if it is stored in the host tier."""
    on_taken: Callable[[SharedObject], None] | None = None
    """Called under the catalog's lock when the version has taken the piece over."""
    stored_object: SharedObject | None = None
    """A stored object that already holds the bytes; the donor keeps a reference to it."""


@dataclass(slots=True, eq=False)
class _Draft:
    """A version that is being saved."""

    manifest: Manifest
    placed: list[ObjectPlacement]
    objects: list[SharedObject]
    """One per section: the version's own, or another rank's."""
    own: set[SharedObject] = field(default_factory=set)
    """Objects to write."""
    others: set[SharedObject] = field(default_factory=set)
    """Objects of other ranks, referenced in `held`."""
    held: list[tuple[SharedObject, TierName]] = field(default_factory=list)
    """References to release when the save ends."""
    donated: dict[SharedObject, Piece] = field(default_factory=dict)
    """Own objects whose bytes already are in the host tier."""
    manifest_bytes: int = 0
    """Size of the encoded manifest."""
    on_copy: Callable[[], None] = lambda: None
    """As for `Saver.save`."""

    def version(self) -> Version:
        """The version to store."""
        ordinal = self.manifest.ordinal
        return Version(self.manifest, tuple(self.objects), last_use=ordinal, last_use_s=0.0)

    def header_bytes(self, tier: TierName) -> int:
        """Size of the header in a tier; a lower bound until all objects have a location."""
        records = [found.record(tier) for found in self.objects]
        return header_bytes(self.manifest_bytes, records)

    def replace(self, index: int) -> SharedObject:
        """Use an own object for a section instead of another rank's."""
        own = new_object(self.manifest, self.manifest.sections[index])
        self.others.discard(self.objects[index])
        self.own.add(own)
        self.objects[index] = own
        return own

    def missing(self, tier: TierName) -> set[SharedObject]:
        """Objects that must be written to complete the version in a tier."""
        return self.own | {found for found in self.others if not found.is_in(tier)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounters:
    """Outcomes of sections that were declared to be replicas."""

    shared: int = 0
    shared_bytes: int = 0
    """Bytes that were not stored again."""
    uncopied_bytes: int = 0
    """Bytes of them that were not copied from their device either, because digests were equal."""
    different: int = 0
    """Sections whose bytes differ from the declared replica; they are stored separately."""


class Saver:
    """Stores versions. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: dict[TierName, Tier],
        pool: HostPool,
        mover: Mover,
        allocator: TierAllocator,
        faults: FaultPoints,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._pool = pool
        self._mover = mover
        self._allocator = allocator
        self._faults = faults
        self.replicas = ReplicaCounters()
        """Updated under the catalog's lock."""

    def save(
        self,
        manifest: Manifest,
        memory: WritableDevice,
        extents: Sequence[Extent],
        superseded: Iterable[str],
        *,
        host_allowed: bool,
        digest_wanted: str | None = None,
        donated: DonatedSection | None = None,
        on_copy: Callable[[], None] = lambda: None,
    ) -> Version:
        """Store a version whose data lies in `memory` at `extents`. `on_copy` is called once the
        version has its space in the host tier, before its bytes are copied.

        Raises:
            StateTierFullError: no tier has space, even after eviction.
            CorruptStateError: the data does not match `digest_wanted`.
        """
        draft = self._claim(manifest, memory, extents, donated)
        draft.on_copy = on_copy
        self._faults.reach("put.claimed")
        try:
            for index, found in enumerate(draft.objects):
                if found in draft.others and (
                    donated is None or found is not donated.stored_object
                ):
                    self._share_or_copy(draft, index)
            tier, header = self._write_to_a_tier(draft, superseded, host_allowed=host_allowed)
            self._faults.reach("put.copied")
            try:
                self._check_digest(draft, digest_wanted)
                version = draft.version()
                self._tiers[tier].write_header(version.record(tier), "put")
            except BaseException:
                with self._catalog.lock:
                    self._unreserve_header(tier, header)
                raise
            with self._catalog.lock:
                self._catalog.set_current(version)
                self._catalog.add_header(version, tier, header)
                version.last_use_s = self._allocator.now()
                if tier == HOST and donated is not None and donated.on_taken is not None:
                    donated.on_taken(draft.objects[donated.section])
            self._faults.reach("put.dropped")
            return version
        except BaseException:
            with self._catalog.lock:
                for found in draft.donated:
                    # The save failed: the worker's allocation keeps the memory.
                    found.pieces = None
                for found in draft.own:
                    if found.state == ObjectState.PENDING:
                        self._catalog.finish_object(found, ObjectState.FAILED)
            raise
        finally:
            with self._catalog.lock:
                for found, tier in draft.held:
                    self._catalog.release([found], tier)

    def _claim(
        self,
        manifest: Manifest,
        memory: WritableDevice,
        extents: Sequence[Extent],
        donated: DonatedSection | None,
    ) -> _Draft:
        catalog = self._catalog
        places = ExtentMap(extents)
        draft = _Draft(manifest, [], [])
        draft.manifest_bytes = len(msgspec.json.encode(manifest))
        with catalog.lock:
            keys = share_keys(manifest)
            for index, (section, key) in enumerate(zip(manifest.sections, keys, strict=True)):
                draft.placed.append(ObjectPlacement(memory, places, section.start))
                if donated is not None and donated.section == index:
                    draft.objects.append(self._add_donated(draft, donated, section))
                    continue
                found = catalog.shared.get(key) if key is not None else None
                if found is not None and found in draft.own:
                    # The version names the key twice; it must not wait for itself.
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

    def _add_donated(
        self, draft: _Draft, donated: DonatedSection, section: Section
    ) -> SharedObject:
        """The object of a donated section. The catalog's lock is held."""
        if donated.stored_object is not None:
            self._catalog.acquire([donated.stored_object], HOST)
            draft.held.append((donated.stored_object, HOST))
            draft.others.add(donated.stored_object)
            return donated.stored_object
        found = new_object(draft.manifest, section)
        assert donated.piece is not None
        assert donated.piece.nbytes == padded(section.nbytes), (
            "a donated piece is as long as its section"
        )
        draft.donated[found] = donated.piece
        draft.own.add(found)
        return found

    def _share_or_copy(self, draft: _Draft, index: int) -> None:
        """Share another rank's object if it equals the arena's bytes; else plan an own object."""
        found = draft.objects[index]
        catalog = self._catalog
        with catalog.lock:
            catalog.object_finished.wait_for(lambda: found.state != ObjectState.PENDING)
            tiers = [tier for tier in TierName if found.is_in(tier)]
            for tier in tiers:
                catalog.acquire([found], tier)
                draft.held.append((found, tier))
        if tiers:
            try:
                own = draft.manifest.sections[index].device_digest
                has_digests = bool(own and found.device_digest)
                if has_digests:
                    is_same = own == found.device_digest
                else:
                    is_same = self._mover.is_same(found, draft.placed[index])
                self._count_replica(found, is_same=is_same, has_digests=has_digests)
                if is_same:
                    return
                LOG.warning(
                    "%s differs from its declared replica on another rank; it is stored separately",
                    draft.manifest.description,
                )
            except CorruptStateError as error:
                LOG.warning(
                    "%s does not share a damaged object: %s", draft.manifest.description, error
                )
        draft.replace(index)

    def _count_replica(self, found: SharedObject, *, is_same: bool, has_digests: bool) -> None:
        with self._catalog.lock:
            known = self.replicas
            if is_same:
                known = replace(
                    known,
                    shared=known.shared + 1,
                    shared_bytes=known.shared_bytes + found.nbytes,
                    uncopied_bytes=known.uncopied_bytes + found.nbytes * has_digests,
                )
            else:
                known = replace(known, different=known.different + 1)
            self.replicas = known

    def _write_to_a_tier(
        self, draft: _Draft, superseded: Iterable[str], *, host_allowed: bool
    ) -> tuple[TierName, int]:
        """Write the missing objects to a tier with space; returns the tier and the size of the
        header, which stays reserved."""
        extra_bytes = nvme_extra_bytes = 0
        while True:
            nvme_bytes = self._needed_bytes(draft, NVME, nvme_extra_bytes)
            if not host_allowed:
                tier, reserved = NVME, self._reserve_on_nvme(draft, nvme_bytes, superseded)
            else:
                reserved = self._needed_bytes(draft, HOST, extra_bytes)
                tier = self._allocator.reserve(draft.manifest, reserved, nvme_bytes, superseded)
                reserved = reserved if tier == HOST else nvme_bytes
            self._faults.reach("put.reserved")
            try:
                return tier, self._write(draft, tier, reserved)
            except _ReservationTooSmallError as error:
                if tier == HOST:
                    extra_bytes += error.by_bytes
                else:
                    nvme_extra_bytes += error.by_bytes
            except StateTierFullError:
                if tier == NVME:
                    raise
                # The memory file system is fuller than the tier's accounts; others may use it.
                host_allowed = False

    def _reserve_on_nvme(self, draft: _Draft, nbytes: int, superseded: Iterable[str]) -> int:
        if not self._allocator.try_reserve(NVME, nbytes):
            with self._catalog.lock:
                self._catalog.drop({*superseded, *self._allocator.expendable_names()})
                if not self._catalog.reserve(NVME, nbytes):
                    raise self._catalog.full_error(draft.manifest, nbytes)
        return nbytes

    def _needed_bytes(self, draft: _Draft, tier: TierName, extra_bytes: int = 0) -> int:
        """Bytes of the missing objects and the header in a tier."""
        # A new object is estimated with two pieces; a fragmented one has more.
        expected = 0 if tier == NVME else 2 * len(draft.objects) * PIECE_TEXT_BYTES
        header = padded(draft.header_bytes(tier) + expected + extra_bytes)
        return header + sum(found.bytes_in(tier) for found in self._to_reserve(draft, tier))

    def _to_reserve(self, draft: _Draft, tier: TierName) -> set[SharedObject]:
        """Missing objects that need new space in a tier."""
        return draft.missing(tier) - (draft.donated.keys() if tier == HOST else set())

    def _write(self, draft: _Draft, tier: TierName, reserved: int) -> int:
        """Write the missing objects; returns the size of the header.

        Unused parts of the reservation are returned; all of it is returned on an error.
        """
        catalog = self._catalog
        written: dict[SharedObject, ObjectPlacement] = {}
        try:
            with catalog.lock:
                missing = draft.missing(tier)
                # An object that reached this tier after the comparison could leave it again.
                brought = draft.others - missing - {o for o, held in draft.held if held == tier}
                catalog.acquire(brought, tier)
                draft.held += [(found, tier) for found in brought]
            for index, found in enumerate(draft.objects):
                if found not in missing:
                    continue
                if found in draft.others:
                    # The shared object is in the other tier, so this version writes its own here.
                    found = draft.replace(index)
                written[found] = draft.placed[index]
                if tier == HOST and found in draft.donated:
                    found.pieces = (draft.donated[found],)
                elif tier == HOST:
                    manifest = draft.manifest
                    near = self._pool.node_of(manifest.shard)
                    found.pieces = self._pool.alloc(found.bytes_in(HOST), manifest.tenant, near)
            header = draft.header_bytes(tier)
            copied = {
                o: placed for o, placed in written.items() if tier != HOST or o not in draft.donated
            }
            used = header + sum(found.bytes_in(tier) for found in copied)
            if used > reserved:
                raise _ReservationTooSmallError(used - reserved)
            if tier == HOST:
                draft.on_copy()
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
                    if tier == HOST and found in draft.donated:
                        found.pieces = None
                    catalog.discard_written(found, tier)
                catalog.unreserve(tier, reserved)
            raise
        if tier == HOST:
            self._pool.reserve_other(header)
        with catalog.lock:
            catalog.unreserve(tier, reserved - used)
            catalog.acquire(written, tier)
            draft.held += [(found, tier) for found in written]
            for found in written:
                catalog.finish_object(found, ObjectState.WHOLE)
        return header

    def _unreserve_header(self, tier: TierName, header: int) -> None:
        self._catalog.unreserve(tier, header)
        if tier == HOST:
            self._pool.reserve_other(-header)

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


class _ReservationTooSmallError(Exception):
    """The reservation is too small: the version is more fragmented than estimated, or could not
    share an object."""

    def __init__(self, by_bytes: int) -> None:
        super().__init__(f"{by_bytes} bytes more are needed")
        self.by_bytes = by_bytes


def new_object(manifest: Manifest, section: Section) -> SharedObject:
    """A pending object for a section."""
    # Unique, because the file of a dropped version of the same name may still be read.
    name = f"{manifest.file_name}.{uuid.uuid4().hex[:12]}"
    return SharedObject(
        id=name,
        nbytes=section.nbytes,
        file_bytes=file_bytes(name, section.nbytes),
        device_digest=section.device_digest,
    )
