"""All versions a node holds, over its two tiers; the only place that knows where state lies.

Laws:

- A version is stored from the moment its header has its name until it is dropped or replaced.
- A tier never holds more than its bound, counting what is being written and what is still read.
- Who began to use a version keeps these very bytes, whatever becomes of it. A dropped version loses
  its name at once, so no crash brings it back; its bytes count until its last user is done.
- A version in host may have a copy on NVMe, which makes taking it out of host free and gives way
  when room there is short. After a crash the version of the higher ordinal counts, in whichever
  tier.
- Bytes that several ranks hold alike are stored once, and given up with the last that has them.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from plexrl.errors import QuotaExceededError, StateTierFullError
from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.statemanager.device.memory import DeviceMemory
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.eviction.promotion import Promoter
from plexrl.statemanager.eviction.tenant_quotas import TenantQuotas
from plexrl.statemanager.eviction.tier_allocator import Rooms
from plexrl.statemanager.fault_points import FaultPoints
from plexrl.statemanager.host.allocations import HostLoans, HostState
from plexrl.statemanager.host.lending_pool import LendingPool
from plexrl.statemanager.store.catalog import Catalog
from plexrl.statemanager.store.nvme import NvmeObjects
from plexrl.statemanager.store.objects import Version
from plexrl.statemanager.store.recovery import recover
from plexrl.statemanager.store.saving import Given, ReplicaTally, Saver
from plexrl.statemanager.store.tier import Tier
from plexrl.statemanager.store.versions.lease import Lease, damage_named
from plexrl.statemanager.store.versions.state_location import Whereabouts, whereabouts
from plexrl.statemanager.store.versions.versions import Extent, Manifest, Section, VersionKind
from plexrl.statemanager.transfer.copy.data_plane import DataPlane, OnMap
from plexrl.statemanager.transfer.copy.mover import Mover
from plexrl.statemanager.transfer.resumable_receive import Fetch, ResumableReceive

LOG = logging.getLogger(__name__)

HOST, NVME = TierName.HOST, TierName.NVME


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A version and where it lies now."""

    manifest: Manifest
    tier: TierName
    nbytes: int
    """It takes there, with all that it shares."""


class Store:
    """Thread-safe. The host tier is filled first and spills to NVMe."""

    def __init__(
        self,
        config: StateManagerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_map: OnMap | None = None,
        on_unmap: OnMap | None = None,
    ) -> None:
        """Take over the directories of `config`, with all that is whole there.

        `clock` is what `expect` speaks of. `on_map` and `on_unmap` are told of memory that a device
        may want pinned.

        Raises:
            ConflictError: another daemon uses one of the directories.
        """
        self._faults = FaultPoints(config.fault_points)
        host = Tier(HOST, Path(config.host_dir), self._faults)
        try:
            nvme = Tier(NVME, Path(config.nvme_dir), self._faults)
        except BaseException:
            host.close()
            raise
        self._tiers = {HOST: host, NVME: nvme}
        self._pool = LendingPool(
            host.directory,
            config.host_bytes,
            segment_bytes_max=config.segment_bytes_max,
            memory_node=config.memory_node,
            on_map=on_map,
            on_unmap=on_unmap,
        )
        self.plane = DataPlane(
            data_threads=config.data_threads,
            queue_depth=config.nvme_queue_depth,
            on_map=on_map,
            on_unmap=on_unmap,
        )
        """What moves bytes; for others who do."""
        self._objects = NvmeObjects(nvme, self.plane)
        self._mover = Mover(self._pool, self._objects, self.plane, self._faults)
        bounds = {HOST: config.host_bytes, NVME: config.nvme_bytes}
        self._catalog = Catalog(self._tiers, bounds, self._pool, self._objects)
        self._rooms = Rooms(self._catalog, self._tiers, self._mover, clock)
        self._saver = Saver(
            self._catalog, self._tiers, self._pool, self._mover, self._rooms, self._faults
        )
        self._promoter = Promoter(self._catalog, self._tiers, self._pool, self._mover, self._rooms)
        self.loans = HostLoans(self._catalog, self._pool, self._rooms)
        """Host memory that workers borrow; lent by `lend`, which knows of quotas."""
        self.quotas = TenantQuotas(config, self._catalog, self.loans)
        recover(self._catalog, self._tiers, self._pool, self._objects, clock())
        self._arrivals = ResumableReceive(
            self._catalog, host, self._pool, self._rooms, self._faults
        )
        self._arrivals.recover()
        self.loans.recover()
        self._pool.remove_unclaimed()
        if config.host_prefault_bytes:
            self._pool.prefault(config.host_prefault_bytes)

    def lend(self, state: HostState) -> None:
        """Lend a rank host memory to work in.

        Raises:
            StateTierFullError: the host tier has no room, whatever is moved.
            QuotaExceededError: its tenant may not have so much.
        """
        try:
            self.quotas.check_loan(state)
        except QuotaExceededError:
            if not self._drop_earlier(state.tenant):
                raise
            self.quotas.check_loan(state)
        self.loans.lend(state)

    def put(
        self,
        manifest: Manifest,
        memory: DeviceMemory,
        superseded: Iterable[str] = (),
        host: HostState | None = None,
    ) -> StoredVersion:
        """Store a version from an arena; a version of its name is replaced.

        `superseded` names versions that may be dropped if room is short. `host` is what the rank
        has in host memory, whose bytes are the last section: where the version comes to lie in
        host, it takes them over and the rank reads from it henceforth.

        Raises:
            ConflictError: the rank can still write to its host memory, or has none.
            StateTierFullError: no tier has room, whatever is moved.
            QuotaExceededError: its tenant may not have so much stored.
        """
        manifest = replace(manifest, stamp=uuid.uuid4().hex)
        given = None
        if host is not None:
            given = self.loans.given(host, len(manifest.sections) - 1)
            memory = self.loans.memory(host, memory)
        return self._put(manifest, memory, manifest.extents, superseded, None, given)

    def adopt(self, manifest: Manifest, memory: DeviceMemory) -> StoredVersion:
        """Store another node's version, stamp and digest included, from its data as it lies there;
        a version of its name is replaced.

        Raises:
            CorruptStateError: the bytes are not those of the digest.
            StateTierFullError: no tier has room, whatever is moved.
            QuotaExceededError: its tenant may not have so much stored.
        """
        whole = (Extent(arena_offset=0, file_offset=0, nbytes=manifest.nbytes),)
        return self._put(manifest, memory, whole, (), manifest.digest)

    def receive(
        self, manifest: Manifest, digests: Sequence[bytes], fetch: Fetch, far: DeviceMemory
    ) -> tuple[StoredVersion, int]:
        """Store another node's version, stamp and digest included, as `fetch` brings it; a version
        of its name is replaced. Returns the bytes that were fetched: what arrived before this was
        cut, however it was, is kept for the next time.

        `digests` are those of the blocks of each section, and of all that arrives. Where host has
        no room it goes to NVMe, from `far`, and begins anew if it is cut.

        Raises:
            CorruptStateError: the bytes are not those of the digests.
            StateTierFullError: no tier has room, whatever is moved.
            QuotaExceededError: its tenant may not have so much stored.
            OperationCancelledError: the deployment was released meanwhile.
            PlexRLError: what `fetch` raises.
        """
        with self._arrivals.turn(manifest) as cancelled:
            for stored in self.find(lambda m: m.name == manifest.name):
                if stored.manifest.stamp == manifest.stamp:
                    return stored, 0
            with self._catalog.lock:
                host_allowed = self.quotas.check(manifest, frozenset())
            if host_allowed:
                try:
                    version, moved = self._arrivals.receive(manifest, digests, fetch, cancelled)
                except StateTierFullError as error:
                    LOG.info("%s goes to NVMe: %s", manifest.description, error)
                else:
                    with self._catalog.lock:
                        return _stored(version), moved
            return self.adopt(manifest, far), manifest.nbytes

    @contextmanager
    def lease(self, name: str, description: str) -> Iterator[Lease]:
        """The version of that name, to read while the block runs.

        Raises:
            StateLostError: there is no such version; `description` says which in words.
        """
        with self._using(name, description) as (version, tier):
            lease = self._lease(version, tier)
            try:
                yield lease
            finally:
                lease.close()

    @contextmanager
    def lease_in_memory(self, name: str, description: str) -> Iterator[Lease]:
        """As `lease`, with the version brought into the host tier first.

        Raises:
            StateLostError: there is no such version.
            CorruptStateError: it was spilled and is damaged.
            StateTierFullError: the host tier cannot take it.
        """
        while True:
            with self._using(name, description) as (version, tier):
                if tier == HOST:
                    lease = self._lease(version, tier)
                    try:
                        yield lease
                    finally:
                        lease.close()
                    return
                with damage_named(version.manifest, tier):
                    self._promoter.promote(version)

    def load(
        self,
        name: str,
        description: str,
        memory: DeviceMemory,
        check: Callable[[Manifest], None] | None = None,
        host: HostState | None = None,
    ) -> Lease:
        """Write a version to where its extents lie in an arena; returns the lease it had.

        `check` may refuse the version before anything is written. Background moves of the
        deployment end first, as this reads the same bytes. `host` is what the
        rank has in host memory: it reads the last section where that lies, or is lent a copy.

        Raises:
            StateLostError: there is no such version, or the arena is gone.
            CorruptStateError: it is damaged; the arena holds some of it.
        """
        with self.lease(name, description) as lease:
            if check is not None:
                check(lease.manifest)
            self._rooms.cancel(lease.manifest.deployment)
            if host is not None and not self.loans.hold(host, lease.last):
                self.lend(host)
            if host is None:
                lease.load(memory)
            else:
                lease.load(self.loans.memory(host, memory), without_last=host.loan is None)
            return lease

    def prefetch(self, name: str, description: str) -> bool:
        """Bring a version to the host tier if nothing has to give way; returns whether it is there.

        Raises:
            StateLostError: there is no such version.
            OperationCancelledError: something more urgent came; it stays where it is.
            CorruptStateError: it is damaged; it stays where it is.
            StorageError: the host tier cannot take it; it stays where it is.
        """
        with self._using(name, description, counts=False) as (version, tier):
            if tier == HOST:
                return True
            if not self.quotas.has_host_room(version):
                return False
            with (
                self._rooms.background(version.manifest.deployment) as move,
                damage_named(version.manifest, tier),
            ):
                return self._promoter.promote_if_free(version, move.cancelled)

    def keep_copy(self, name: str) -> bool:
        """Write a copy of a version in host to NVMe, which makes spilling it free; returns whether
        it is there.

        Raises:
            OperationCancelledError: something more urgent came.
            StorageError: NVMe cannot take it.
        """
        return self._rooms.keep_copy(name)

    def undrained(self) -> list[str]:
        """Names of versions in host that have no copy on NVMe, in the order they would spill."""
        with self._catalog.lock:
            found = [
                version
                for version in self._catalog.current.values()
                if NVME not in version.header_bytes
            ]
            found.sort(key=lambda v: (-self._rooms.next_use(v), v.last_use, v.manifest.name))
            return [version.manifest.name for version in found]

    def expect(self, deployment: str, next_use: float | None) -> None:
        """Predict when a deployment's state is used next, in seconds on the store's clock.

        Absent: nothing is known. What is expected last is spilled first (`residency`).
        """
        self._rooms.expect(deployment, next_use)

    def expect_in(self, deployment: str, seconds: float) -> None:
        """As `expect`, counted from now."""
        self._rooms.expect(deployment, self._rooms.now() + max(0.0, seconds))

    def whereabouts(self, since: int) -> tuple[int, list[Whereabouts]]:
        """Where the newest state of deployments lies, of those where it may have changed since the
        returned number was `since`; 0: of all."""
        with self._catalog.lock:
            return self._catalog.changes.serial, whereabouts(self._catalog, since)

    def find(self, wanted: Callable[[Manifest], bool]) -> list[StoredVersion]:
        """Every version for which `wanted` holds, by name."""
        with self._catalog.lock:
            return [
                _stored(version)
                for _, version in sorted(self._catalog.current.items())
                if wanted(version.manifest)
            ]

    def make_ready(self, nbytes: int) -> None:
        """Expect versions of so many bytes together: have memory for them resident soon."""
        self._pool.make_ready(nbytes)

    def keep_while_room(self, names: Iterable[str]) -> None:
        """From now on these versions are dropped before anything else, or when their tenant has
        more than it may."""
        with self._catalog.lock:
            for name in names:
                version = self._catalog.current.get(name)
                if version is not None:
                    version.only_while_room = True
                    if self.quotas.is_exceeded(version.manifest.tenant):
                        self._catalog.drop([name])

    def move_out(self, name: str) -> None:
        """Have a version on NVMe only, in the background. Raises as `Rooms.move_out`."""
        self._rooms.move_out(name)

    def drop(self, names: Iterable[str]) -> None:
        """Give versions up; what is in use goes when its last user is done."""
        with self._catalog.lock:
            self._catalog.drop(names)

    def release(self, deployment: str) -> None:
        """Give up all of a deployment, background moves of it first."""
        self._rooms.cancel(deployment)
        self._arrivals.release(deployment)
        self._rooms.expect(deployment, None)
        versions = self.find(lambda manifest: manifest.deployment == deployment)
        self.drop(version.manifest.name for version in versions)

    def cancel(self) -> None:
        """Have background moves end, and wait until they have."""
        self._rooms.cancel()

    def touch(self, name: str) -> None:
        """Count the version as used now."""
        with self._catalog.lock:
            if name in self._catalog.current:
                self._rooms.used(self._catalog.current[name])

    def used_bytes(self, tier: TierName) -> int:
        """Bytes in a tier, those being written or still read included."""
        with self._catalog.lock:
            return self._catalog.used_bytes[tier]

    def pool_taken_bytes(self) -> int:
        """Of the host tier's memory, what is handed out or set aside."""
        return self._pool.used_bytes + self._pool.aside_bytes

    @property
    def replicas(self) -> ReplicaTally:
        """What became of sections that another rank had already, since the start."""
        return self._saver.replicas

    def persist(self) -> list[str]:
        """Move every loadable version to the NVMe tier, the newest first (a clean exit).

        Returns the names of those that could not be kept there; they stay where they are.
        """
        with self._catalog.lock:
            found = [
                version
                for version in self._catalog.current.values()
                if version.manifest.kind == VersionKind.STATE and version.tier == HOST
            ]
        return self._rooms.spill_all(
            sorted(found, key=lambda v: (-v.manifest.seq, v.manifest.name))
        )

    def close(self) -> None:
        """Let another process use the directories; nothing may be under way."""
        self._rooms.cancel()
        self.plane.close()
        self._pool.close()
        for tier in self._tiers.values():
            tier.close()

    def check(self) -> None:
        """Assert that accounts agree with what is there, when nothing is under way."""
        self._pool.check()
        with self._catalog.lock:
            headers = sum(v.header_bytes.get(HOST, 0) for v in self._catalog.current.values())
            headers += self._arrivals.reserved_bytes()
            assert self._catalog.used_bytes[HOST] == self._pool.used_bytes + headers
            assert set(self._objects.ids()) == {
                found.id
                for version in self._catalog.current.values()
                if NVME in version.header_bytes
                for found in version.objects
            }

    def _put(
        self,
        manifest: Manifest,
        memory: DeviceMemory,
        extents: Sequence[Extent],
        superseded: Iterable[str],
        digest: str | None,
        given: Given | None = None,
    ) -> StoredVersion:
        superseded = frozenset(superseded)
        if manifest.nbytes and not manifest.sections:
            manifest = replace(manifest, sections=(Section(start=0, nbytes=manifest.nbytes),))
        with self._catalog.lock:
            there = given.piece.nbytes if given is not None and given.piece is not None else 0
            # A tenant's earlier versions never count against what it needs.
            needless = self._rooms.only_while_room(manifest.tenant)
            host_allowed = self.quotas.check(manifest, superseded | needless, there)
            manifest = replace(manifest, ordinal=self._catalog.tick())
            self.quotas.begin(manifest, superseded, host_allowed=host_allowed)
        saved = partial(self._saver.save, manifest, memory, extents, superseded)
        try:
            version = saved(host_allowed=host_allowed, digest_wanted=digest, given=given)
        finally:
            self.quotas.end(manifest)
        with self._catalog.lock:
            if needless and self.quotas.is_exceeded(manifest.tenant):
                self._catalog.drop(needless)
            return _stored(version)

    def _drop_earlier(self, tenant: str) -> bool:
        """Drop a tenant's earlier versions; whether there were some."""
        with self._catalog.lock:
            names = self._rooms.only_while_room(tenant)
            self._catalog.drop(names)
            return bool(names)

    def _lease(self, version: Version, tier: TierName) -> Lease:
        return Lease(version, tier, self._mover, self._pool, self._objects, self._faults)

    @contextmanager
    def _using(
        self, name: str, description: str, *, counts: bool = True
    ) -> Iterator[tuple[Version, TierName]]:
        """A version, its objects held in place where it is read from. `counts`: as a use."""
        catalog = self._catalog
        with catalog.lock:
            version = catalog.version(name, description)
            tier = version.tier
            catalog.acquire(version.objects, tier)
            version.users += 1
            if counts:
                self._rooms.used(version)
        try:
            yield version, tier
        finally:
            with catalog.lock:
                version.users -= 1
                catalog.release(version.objects, tier)


def _stored(version: Version) -> StoredVersion:
    return StoredVersion(
        manifest=version.manifest, tier=version.tier, nbytes=version.bytes_in(version.tier)
    )
