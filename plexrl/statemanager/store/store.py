"""The store of all versions on a node, over its two tiers; the only authority on their location.

Invariants:

- A version is stored from the rename of its header until it is dropped or replaced.
- A tier never exceeds its capacity, with objects that are being written or read included.
- A reader of a version keeps the same bytes until it is done. A dropped version loses its header at
  once, so a crash does not restore it; its bytes count until its last reader is done.
- A version in the host tier may have a copy on NVMe. Its eviction from host is then free, and the
  copy is dropped when NVMe is full. After a crash the version with the higher ordinal is current.
- Equal bytes of several ranks are stored once, and freed with the last version that refers to them.
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
from plexrl.process.memory.numa import distinct
from plexrl.statemanager.bytes.data_plane import DataPlane, OnMap
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.memory import WritableDevice
from plexrl.statemanager.layout.versions import Extent, Manifest, Section, VersionKind
from plexrl.statemanager.store.objects import Version
from plexrl.statemanager.store.receiving.receive import DataMemory, ResumableReceive, VersionData
from plexrl.statemanager.store.recovery import recover
from plexrl.statemanager.store.saving.mover import Mover
from plexrl.statemanager.store.saving.saving import DonatedSection, ReplicaCounters, Saver
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.fault_points import FaultPoints
from plexrl.statemanager.store.tiers.host.allocations import HostAllocations, HostState
from plexrl.statemanager.store.tiers.host.worker_file_pool import WorkerFilePool
from plexrl.statemanager.store.tiers.nvme import NvmeObjects
from plexrl.statemanager.store.tiers.promotion import Promoter
from plexrl.statemanager.store.tiers.tenant_quotas import TenantQuotas
from plexrl.statemanager.store.tiers.tier import Tier
from plexrl.statemanager.store.tiers.tier_allocator import TierAllocator
from plexrl.statemanager.store.versions.catalog import Catalog
from plexrl.statemanager.store.versions.lease import VersionLease, describe_damage
from plexrl.statemanager.store.versions.state_location import StateLocation, state_locations

LOG = logging.getLogger(__name__)

HOST, NVME = TierName.HOST, TierName.NVME


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredVersion:
    """A version and its tier."""

    manifest: Manifest
    tier: TierName
    nbytes: int
    """Bytes in that tier, shared objects included."""


class Store:
    """Stores versions in the host tier, and spills them to NVMe. Thread-safe."""

    def __init__(
        self,
        config: StateManagerConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_map: OnMap | None = None,
        on_unmap: OnMap | None = None,
        device_nodes: Sequence[int | None] = (),
    ) -> None:
        """Lock the directories of `config` and recover the versions in them.

        `clock` is that of `expect_use`. `on_map` and `on_unmap` are called for memory that a device
        may want pinned. `device_nodes`: memory node of each device, where its ranks' memory is
        allocated unless `config` names one node for all.

        Raises:
            ConflictError: another daemon uses one of the directories.
        """
        self._faults = FaultPoints(config.fault_points)
        self._tiers = _open_tiers(config, self._faults)
        host, nvme = self._tiers[HOST], self._tiers[NVME]
        self._pool = WorkerFilePool(
            host.directory,
            config.host_bytes,
            segment_bytes_max=config.segment_bytes_max,
            memory_nodes=(
                distinct(device_nodes) if config.memory_node is None else (config.memory_node,)
            ),
            on_map=on_map,
            on_unmap=on_unmap,
        )
        self.plane = DataPlane(
            data_threads=config.data_threads,
            queue_depth=config.nvme_queue_depth,
            on_map=on_map,
            on_unmap=on_unmap,
        )
        """Copy threads and buffers, which other parts of the daemon share."""
        self._objects = NvmeObjects(nvme, self.plane)
        self._mover = Mover(self._pool, self._objects, self.plane, self._faults)
        bounds = {HOST: config.host_bytes, NVME: config.nvme_bytes}
        self._catalog = Catalog(self._tiers, bounds, self._pool, self._objects)
        self.allocator = TierAllocator(self._catalog, self._tiers, self._mover, clock)
        """Reserves space, and moves versions in the background."""
        self._saver = Saver(
            self._catalog, self._tiers, self._pool, self._mover, self.allocator, self._faults
        )
        self._promoter = Promoter(
            self._catalog, self._tiers, self._pool, self._mover, self.allocator
        )
        self.host_allocations = HostAllocations(self._catalog, self._pool, self.allocator)
        """Host memory of workers. `allocate_host` allocates it, within the quotas."""
        self.quotas = TenantQuotas(config, self._catalog, self.host_allocations)
        recover(self._catalog, self._tiers, self._pool, self._objects, clock())
        self._receiver = ResumableReceive(
            self._catalog, host, self._pool, self.allocator, self._faults
        )
        self._receiver.recover()
        self.host_allocations.recover()
        self._pool.remove_unclaimed()
        self._device_nodes = tuple(device_nodes)
        self._pool.prefault(config.prefault_bytes)

    def place_rank(self, shard: tuple[str, int], device: int) -> int | None:
        """Allocate a rank's memory near its device from now on; returns the device's memory node,
        or None if it is unknown."""
        node = self._device_nodes[device] if device < len(self._device_nodes) else None
        self._pool.place_rank(shard, node)
        return node

    def allocate_host(self, state: HostState) -> None:
        """Allocate host memory for a rank.

        Raises:
            StateTierFullError: the host tier has no space, even after eviction.
            QuotaExceededError: the tenant's quota is too small.
        """
        try:
            self.quotas.check_allocation(state)
        except QuotaExceededError:
            if not self._drop_expendable(state.tenant):
                raise
            self.quotas.check_allocation(state)
        self.host_allocations.allocate(state)

    def put(
        self,
        manifest: Manifest,
        memory: WritableDevice,
        superseded: Iterable[str] = (),
        host: HostState | None = None,
        on_copy: Callable[[], None] = lambda: None,
    ) -> TieredVersion:
        """Store a version from an arena; replaces a version of the same name.

        `superseded` names versions that may be dropped if space is short. `host` is the rank's host
        memory, which holds the last section. If the version is stored in the host tier, it takes
        this memory over, which the rank then reads from the version. `on_copy`: as `Saver.save`.

        Raises:
            ConflictError: the rank can still write to its host memory, or has none.
            StateTierFullError: no tier has space, even after eviction.
            QuotaExceededError: the tenant's quota is too small.
        """
        manifest = replace(manifest, stamp=uuid.uuid4().hex)
        donated = None
        if host is not None:
            donated = self.host_allocations.donate(host, len(manifest.sections) - 1)
            memory = self.host_allocations.joined_memory(host, memory)
        return self._put(manifest, memory, manifest.extents, superseded, None, donated, on_copy)

    def adopt(self, manifest: Manifest, data: VersionData) -> TieredVersion:
        """Store another node's version, with its stamp and digest; replaces one of the same name.

        Raises:
            CorruptStateError: the bytes do not match the digest.
            StateTierFullError: no tier has space, even after eviction.
            QuotaExceededError: the tenant's quota is too small.
        """
        whole = (Extent(arena_offset=0, file_offset=0, nbytes=manifest.nbytes),)
        return self._put(manifest, DataMemory(data, manifest.nbytes), whole, (), manifest.digest)

    def receive(
        self, manifest: Manifest, digests: Sequence[bytes], data: VersionData
    ) -> tuple[TieredVersion, int]:
        """Store another node's version, with its stamp and digest, block by block; replaces
        a version of the same name. Returns the version and the bytes fetched by this call.
        Blocks that arrived before an interruption are kept for the next call.

        `digests`: block digests of each section. If host is full, `data` is copied to NVMe, which
        cannot be resumed.

        Raises:
            CorruptStateError: the bytes do not match the digests.
            StateTierFullError: no tier has space, even after eviction.
            QuotaExceededError: the tenant's quota is too small.
            OperationCancelledError: the deployment was released meanwhile.
            PlexRLError: raised by `data`.
        """
        with self._receiver.turn(manifest) as cancelled:
            for stored in self.find(lambda m: m.name == manifest.name):
                if stored.manifest.stamp == manifest.stamp:
                    return stored, 0
            with self._catalog.lock:
                host_allowed = self.quotas.check(manifest, frozenset())
            if host_allowed:
                try:
                    version, moved = self._receiver.receive(manifest, digests, data, cancelled)
                except StateTierFullError as error:
                    LOG.info("%s goes to NVMe: %s", manifest.description, error)
                else:
                    with self._catalog.lock:
                        return _stored(version), moved
            return self.adopt(manifest, data), manifest.nbytes

    @contextmanager
    def lease(self, name: str, description: str) -> Iterator[VersionLease]:
        """Lease the version of that name for reading, while the block runs.

        Raises:
            StateLostError: there is no such version; the message contains `description`.
        """
        with self._using(name, description) as held, self._open_lease(*held) as lease:
            yield lease

    @contextmanager
    def lease_in_memory(self, name: str, description: str) -> Iterator[VersionLease]:
        """As `lease`, after the version is promoted to the host tier.

        Raises:
            StateLostError: there is no such version.
            CorruptStateError: the version was spilled and is damaged.
            StateTierFullError: the host tier has no space, even after eviction.
        """
        while True:
            with self._using(name, description) as (version, tier):
                if tier == HOST:
                    with self._open_lease(version, tier) as lease:
                        yield lease
                    return
                with describe_damage(version.manifest, tier):
                    self._promoter.promote(version)

    def load(
        self,
        name: str,
        description: str,
        memory: WritableDevice,
        check: Callable[[Manifest], None] | None = None,
        host: HostState | None = None,
    ) -> VersionLease:
        """Write a version to its extents in an arena; returns the lease, which has ended.

        `check` may refuse the version before anything is written. Background moves of the
        deployment are cancelled first, because they read the same bytes. `host` is the rank's host
        memory: the rank reads the last section in place, or gets an allocation with a copy.

        Raises:
            StateLostError: there is no such version, or the arena no longer exists.
            CorruptStateError: the version is damaged; the arena may hold parts of it.
        """
        with self.lease(name, description) as lease:
            if check is not None:
                check(lease.manifest)
            self.allocator.cancel_background(lease.manifest.deployment)
            if host is not None and not self.host_allocations.read_snapshot(
                host, lease.last_object
            ):
                self.allocate_host(host)
            if host is None:
                lease.load(memory)
            else:
                lease.load(
                    self.host_allocations.joined_memory(host, memory),
                    without_last=host.allocation is None,
                )
            return lease

    def prefetch(self, name: str, description: str) -> bool:
        """Promote a version to the host tier if that needs no eviction; returns whether it is
        there.

        On an error the version stays where it is.

        Raises:
            StateLostError: there is no such version.
            OperationCancelledError: a more urgent move cancelled this one.
            CorruptStateError: the version is damaged.
            StorageError: the host tier cannot store it.
        """
        with self._using(name, description, counts=False) as (version, tier):
            if tier == HOST:
                return True
            if not self.quotas.fits_host_quota(version):
                return False
            with (
                self.allocator.background_move(version.manifest.deployment) as move,
                describe_damage(version.manifest, tier),
            ):
                return self._promoter.promote_if_free(version, move.cancelled)

    def without_nvme_copy(self) -> list[str]:
        """Names of the versions without a copy on NVMe, in eviction order."""
        with self._catalog.lock:
            versions = self._catalog.current.values()
            found = [version for version in versions if NVME not in version.header_bytes]
            found.sort(key=lambda v: (-self.allocator.next_use(v), v.last_use, v.manifest.name))
            return [version.manifest.name for version in found]

    def expect_use_in(self, deployment: str, seconds: float) -> None:
        """As `TierAllocator.expect_use`, `seconds` from now."""
        self.allocator.expect_use(deployment, self.allocator.now() + max(0.0, seconds))

    def state_locations(self, since: int) -> tuple[int, list[StateLocation]]:
        """Locations of the newest state of each deployment that may have changed after change
        number `since` (0: all deployments), and the number of the last change."""
        with self._catalog.lock:
            return self._catalog.changes.serial, state_locations(self._catalog, since)

    def find(self, wanted: Callable[[Manifest], bool]) -> list[TieredVersion]:
        """All versions whose manifest satisfies `wanted`, ordered by name."""
        with self._catalog.lock:
            return [
                _stored(version)
                for _, version in sorted(self._catalog.current.items())
                if wanted(version.manifest)
            ]

    def expect_writes(self, nbytes: int) -> None:
        """Prefault memory for versions of `nbytes` together, which will be written soon."""
        self._pool.prefault_free(nbytes)

    def mark_expendable(self, names: Iterable[str]) -> None:
        """Mark versions to be dropped first when space is short; drops them at once if their tenant
        exceeds a quota."""
        with self._catalog.lock:
            for name in names:
                version = self._catalog.current.get(name)
                if version is not None:
                    version.is_expendable = True
                    if self.quotas.is_exceeded(version.manifest.tenant):
                        self._catalog.drop([name])

    def drop(self, names: Iterable[str]) -> None:
        """Drop versions; a version in use is freed after its last reader."""
        with self._catalog.lock:
            self._catalog.drop(names)

    def release(self, deployment: str) -> None:
        """Cancel a deployment's background moves, then drop its versions."""
        self.allocator.cancel_background(deployment)
        self._receiver.release(deployment)
        self.allocator.expect_use(deployment, None)
        self._pool.forget_ranks(deployment)
        versions = self.find(lambda manifest: manifest.deployment == deployment)
        self.drop(version.manifest.name for version in versions)

    def touch(self, name: str) -> None:
        """Record a use of a version."""
        with self._catalog.lock:
            if name in self._catalog.current:
                self.allocator.record_use(self._catalog.current[name])

    def used_bytes(self, tier: TierName) -> int:
        """Used bytes of a tier, including objects being written or read."""
        with self._catalog.lock:
            return self._catalog.used_bytes[tier]

    def pool_bytes(self) -> tuple[int, int]:
        """(used with other files in the directory, used or prefaulted) of the host tier's pool."""
        return self._pool.used_bytes + self._pool.other_bytes, self._pool.resident_bytes

    @property
    def replicas(self) -> ReplicaCounters:
        """Outcomes of declared replicas since the start."""
        return self._saver.replicas

    def persist(self) -> list[str]:
        """Spill all loadable versions to NVMe, the newest first, for a clean exit.

        Returns the names of the versions that could not be spilled.
        """
        with self._catalog.lock:
            versions = self._catalog.current.values()
            in_host = [version for version in versions if version.tier == HOST]
        states = [each for each in in_host if each.manifest.kind == VersionKind.STATE]
        states.sort(key=lambda version: (-version.manifest.seq, version.manifest.name))
        return self.allocator.spill_all(states)

    def close(self) -> None:
        """Unlock the directories. No call may be in progress."""
        self.allocator.cancel_background()
        self.plane.close()
        self._pool.close()
        for tier in self._tiers.values():
            tier.close()

    def check(self) -> None:
        """Assert that the accounts match the stored objects. No call may be in progress."""
        self._pool.check()
        with self._catalog.lock:
            headers = sum(v.header_bytes.get(HOST, 0) for v in self._catalog.current.values())
            headers += self._receiver.reserved_bytes()
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
        memory: WritableDevice,
        extents: Sequence[Extent],
        superseded: Iterable[str],
        digest: str | None,
        donated: DonatedSection | None = None,
        on_copy: Callable[[], None] = lambda: None,
    ) -> TieredVersion:
        superseded = frozenset(superseded)
        if manifest.nbytes and not manifest.sections:
            manifest = replace(manifest, sections=(Section(start=0, nbytes=manifest.nbytes),))
        with self._catalog.lock:
            piece = None if donated is None else donated.piece
            donated_bytes = 0 if piece is None else piece.nbytes
            # Expendable versions do not count against their own tenant.
            expendable = self.allocator.expendable_names(manifest.tenant)
            host_allowed = self.quotas.check(manifest, superseded | expendable, donated_bytes)
            manifest = replace(manifest, ordinal=self._catalog.next_ordinal())
            self.quotas.begin(manifest, superseded, host_allowed=host_allowed)
        save = partial(self._saver.save, manifest, memory, extents, superseded, on_copy=on_copy)
        try:
            version = save(host_allowed=host_allowed, digest_wanted=digest, donated=donated)
        finally:
            self.quotas.end(manifest)
        with self._catalog.lock:
            if expendable and self.quotas.is_exceeded(manifest.tenant):
                self._catalog.drop(expendable)
            return _stored(version)

    def _drop_expendable(self, tenant: str) -> bool:
        """Drop a tenant's expendable versions; returns whether there were any."""
        with self._catalog.lock:
            names = self.allocator.expendable_names(tenant)
            self._catalog.drop(names)
            return bool(names)

    @contextmanager
    def _open_lease(self, version: Version, tier: TierName) -> Iterator[VersionLease]:
        lease = VersionLease(version, tier, self._mover, self._pool, self._objects, self._faults)
        try:
            yield lease
        finally:
            lease.close()

    @contextmanager
    def _using(
        self, name: str, description: str, *, counts: bool = True
    ) -> Iterator[tuple[Version, TierName]]:
        """A version with its objects referenced in the tier that it is read from. `counts`: record
        a use."""
        catalog = self._catalog
        with catalog.lock:
            version = catalog.version(name, description)
            tier = version.tier
            catalog.acquire(version.objects, tier)
            version.users += 1
            if counts:
                self.allocator.record_use(version)
        try:
            yield version, tier
        finally:
            with catalog.lock:
                version.users -= 1
                catalog.release(version.objects, tier)


def _open_tiers(config: StateManagerConfig, faults: FaultPoints) -> dict[TierName, Tier]:
    host = Tier(HOST, Path(config.host_dir), faults)
    try:
        return {HOST: host, NVME: Tier(NVME, Path(config.nvme_dir), faults)}
    except BaseException:
        host.close()
        raise


def _stored(version: Version) -> TieredVersion:
    return TieredVersion(
        manifest=version.manifest, tier=version.tier, nbytes=version.bytes_in(version.tier)
    )
