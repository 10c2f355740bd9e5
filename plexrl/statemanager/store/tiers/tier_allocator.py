"""Reservation of space in the tiers, with eviction when a tier is full.

One thread at a time evicts, and may spill versions meanwhile; it cancels background moves.
Reserving space that is free needs no eviction lock.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from plexrl.errors import PlexRLError
from plexrl.statemanager.layout.versions import VersionKind, encode_header
from plexrl.statemanager.store.objects import SharedObject, Version
from plexrl.statemanager.store.saving.mover import Mover
from plexrl.statemanager.store.tiers.eviction.candidates import eviction_candidates
from plexrl.statemanager.store.tiers.eviction.policy import (
    TierName,
    TierUsage,
    expected_use,
    plan_eviction,
)
from plexrl.statemanager.store.tiers.tier import Tier
from plexrl.statemanager.store.versions.catalog import Catalog, Described

HOST, NVME = TierName.HOST, TierName.NVME


@dataclass(slots=True, eq=False)
class BackgroundMove:
    """A move that other moves may cancel: it checks `cancelled` between two blocks."""

    deployment: str
    cancelled: threading.Event = field(default_factory=threading.Event)


class TierAllocator:
    """Reserves space and evicts versions. Thread-safe."""

    def __init__(
        self,
        catalog: Catalog,
        tiers: dict[TierName, Tier],
        mover: Mover,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._tiers = tiers
        self._mover = mover
        self._clock = clock
        self._evicting = threading.Lock()
        self._copying = threading.Lock()
        self._idle = threading.Condition(catalog.lock)
        self._moves: set[BackgroundMove] = set()
        self._next_use: dict[str, float] = {}
        self.on_shortage: Callable[[], None] = _nothing
        """Called before eviction: frees host memory that is only kept for possible reuse."""

    def expect_use(self, deployment: str, next_use: float | None) -> None:
        """Predict the next use of a deployment's state, on the clock of `now`; absent: unknown. The
        latest next use is evicted first (`plexrl.statemanager.store.tiers.eviction.policy`)."""
        with self._catalog.lock:
            if next_use is None:
                self._next_use.pop(deployment, None)
            else:
                self._next_use[deployment] = next_use

    def now(self) -> float:
        """Time on the allocator's clock, in seconds."""
        return self._clock()

    def record_use(self, version: Version) -> None:
        """Record a use of a version. The catalog's lock is held."""
        version.last_use, version.last_use_s = self._catalog.next_ordinal(), self._clock()
        deployment = version.manifest.deployment
        if self._next_use.get(deployment, version.last_use_s + 1) <= version.last_use_s:
            # The predicted use has happened; the next one is unknown until it is predicted.
            del self._next_use[deployment]

    def next_use(self, version: Version) -> float:
        """Expected time of a version's next use. The catalog's lock is held."""
        if version.is_expendable:
            return math.inf
        predicted = None
        if version.manifest.kind == VersionKind.STATE:
            predicted = self._next_use.get(version.manifest.deployment)
        return expected_use(predicted, version.last_use_s, self._clock())

    def reserve(
        self,
        wanted: Described,
        needed_bytes: int,
        needed_nvme_bytes: int,
        superseded: Iterable[str] = (),
        *,
        host_only: bool = False,
    ) -> TierName:
        """Reserve bytes in a tier, evicting versions if necessary; returns the tier.

        Raises:
            StateTierFullError: no tier has space, even after eviction.
            StorageError: a version could not be spilled.
        """
        catalog = self._catalog
        superseded = frozenset(superseded)
        with catalog.lock:
            if catalog.reserve(HOST, needed_bytes):
                return HOST
        with self._evicting:
            self.cancel_background()
            self.on_shortage()
            while True:
                with catalog.lock:
                    candidates, members = eviction_candidates(catalog, superseded, self.next_use)
                    host, nvme = self._usage(HOST), self._usage(NVME)
                    plan = plan_eviction(needed_bytes, candidates, host, nvme, needed_nvme_bytes)
                    if plan is None or plan.tier == NVME:
                        expendable = self.expendable_names()
                        if not expendable <= superseded:
                            superseded |= expendable
                            continue
                    if plan is None or plan.tier == NVME:
                        copied = self._copied_versions()
                        copies = catalog.exclusive_bytes(copied, NVME)
                        empty = replace(nvme, used_bytes=nvme.used_bytes - copies)
                        better = plan_eviction(
                            needed_bytes, candidates, host, empty, needed_nvme_bytes
                        )
                        if better is not None and (plan is None or better.tier == HOST):
                            # One at a time, so that no more copies are dropped than necessary.
                            catalog.remove_header(copied[0], NVME)
                            continue
                    if plan is None or (host_only and plan.tier == NVME):
                        raise catalog.full_error(wanted, needed_bytes)
                    for name in plan.drop:
                        catalog.drop(members[name])
                    nbytes = needed_bytes if plan.tier == HOST else needed_nvme_bytes
                    if not plan.spill and catalog.reserve(plan.tier, nbytes):
                        return plan.tier
                # The next iteration plans again: a spilled version may have gained a reader, and
                # others may have reserved space that was free.
                for name in plan.spill:
                    for member in members[name]:
                        self.copy_to_nvme(member, keep=False)

    def _usage(self, tier: TierName) -> TierUsage:
        catalog = self._catalog
        return TierUsage(used_bytes=catalog.used_bytes[tier], bytes_max=catalog.bytes_max[tier])

    def try_reserve(self, tier: TierName, nbytes: int) -> bool:
        """Reserve bytes in a tier if they are free; returns whether they were."""
        with self._catalog.lock:
            return self._catalog.reserve(tier, nbytes)

    def copy_to_nvme(self, name: str, *, in_background: bool = False, keep: bool = True) -> bool:
        """Copy a version from the host tier to NVMe; returns False if it is not in the host tier.
        Without `keep` the version then leaves the host tier. A move in the foreground cancels those
        in the background: a copy its deployment's, one that frees host memory all.

        Raises:
            OperationCancelledError: a more urgent move cancelled this one.
            StateTierFullError: NVMe is full.
            StorageError: the copy failed. After any error the version is in the host tier.
        """
        catalog = self._catalog
        with self._referenced_in_host(name) as version:
            if version is None:
                return False
            if in_background:
                with self.background_move(version.manifest.deployment) as move:
                    self._copy_version(version, move.cancelled)
            else:
                self.cancel_background(version.manifest.deployment if keep else None)
                self._copy_version(version, None)
            with catalog.lock:
                if not keep and HOST in version.header_bytes:
                    catalog.remove_header(version, HOST)
        self._tiers[HOST].faults.reach("spill.done")
        return True

    def expendable_names(self, tenant: str | None = None) -> frozenset[str]:
        """Names of a tenant's (absent: all tenants') versions that are dropped first. The catalog's
        lock is held."""
        return frozenset(
            name
            for name, version in self._catalog.current.items()
            if version.is_expendable and tenant in (None, version.manifest.tenant)
        )

    def spill_all(self, versions: Iterable[Version]) -> list[str]:
        """Spill versions in this order; returns the names of those that could not be spilled."""
        left = []
        with self._evicting:
            self.cancel_background()
            for version in versions:
                try:
                    self.copy_to_nvme(version.manifest.name, keep=False)
                except PlexRLError:
                    left.append(version.manifest.name)
        return left

    @contextmanager
    def background_move(self, deployment: str) -> Iterator[BackgroundMove]:
        """A move that others may cancel, while the block runs."""
        move = BackgroundMove(deployment)
        with self._catalog.lock:
            self._moves.add(move)
        try:
            yield move
        finally:
            with self._catalog.lock:
                self._moves.discard(move)
                self._idle.notify_all()

    def cancel_background(self, deployment: str | None = None) -> None:
        """Cancel a deployment's (absent: all) background moves and wait until they end."""
        with self._catalog.lock:
            chosen = {m for m in self._moves if deployment in (None, m.deployment)}
            for move in chosen:
                move.cancelled.set()
            self._idle.wait_for(lambda: not chosen & self._moves)

    @contextmanager
    def _referenced_in_host(self, name: str) -> Iterator[Version | None]:
        """The version of that name with its host objects referenced; None if it is not in host."""
        catalog = self._catalog
        with catalog.lock:
            version = catalog.current.get(name)
            if version is None or HOST not in version.header_bytes:
                version = None
            else:
                catalog.acquire(version.objects, HOST)
        try:
            yield version
        finally:
            if version is not None:
                with catalog.lock:
                    catalog.release(version.objects, HOST)

    def _copy_version(self, version: Version, cancelled: threading.Event | None) -> None:
        """Copy a version, which is referenced in host, to NVMe."""
        catalog = self._catalog
        held: list[SharedObject] = []
        with self._copying:
            try:
                for found in dict.fromkeys(version.objects):
                    self._copy_object(version, found, cancelled)
                    held.append(found)
                self._write_nvme_header(version)
            finally:
                with catalog.lock:
                    catalog.release(held, NVME)

    def _write_nvme_header(self, version: Version) -> None:
        """Write the NVMe header of a version whose objects are referenced there."""
        catalog = self._catalog
        record = version.record(NVME)
        nbytes = len(encode_header(record))
        if NVME in version.header_bytes:
            return
        if not self.try_reserve(NVME, nbytes):
            with catalog.lock:
                raise catalog.full_error(version.manifest, nbytes)
        try:
            self._tiers[NVME].prepare_header(record, "spill")
            with catalog.lock:
                # Under the lock: a version that is dropped now must not get a header.
                if version.retired:
                    self._tiers[NVME].discard_header(record)
                else:
                    self._tiers[NVME].commit_header(record, "spill")
                    catalog.add_header(version, NVME, nbytes)
                    nbytes = 0
        finally:
            with catalog.lock:
                catalog.unreserve(NVME, nbytes)

    def _copy_object(
        self, version: Version, found: SharedObject, cancelled: threading.Event | None
    ) -> None:
        """Copy an object to NVMe if it is not there, and reference it."""
        catalog = self._catalog
        with catalog.lock:
            if found.on_nvme:
                catalog.acquire([found], NVME)
                return
            if not catalog.reserve(NVME, found.file_bytes):
                raise catalog.full_error(version.manifest, found.file_bytes)
        try:
            digests = self._mover.host_to_nvme(found, cancelled)
        except BaseException:
            with catalog.lock:
                catalog.unreserve(NVME, found.file_bytes)
            raise
        with catalog.lock:
            found.on_nvme, found.digests = True, digests
            catalog.acquire([found], NVME)

    def _copied_versions(self) -> list[Version]:
        """Unused versions in host with a copy on NVMe, the earliest next use first. That one's copy
        is dropped first, because its version is evicted last."""
        found = [
            version
            for version in self._catalog.current.values()
            if len(version.header_bytes) == len(TierName) and not version.users
        ]
        return sorted(found, key=lambda v: (self.next_use(v), -v.last_use, v.manifest.name))


def _nothing() -> None:
    """Free nothing."""
