"""Room in a tier, and what must move to make it.

Room is made by one thread at a time, which may spill meanwhile; moves in the background give way to
it. Reserving what is free already takes no turn.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from plexrl.errors import PlexRLError
from plexrl.statemanager.eviction.candidates import residents
from plexrl.statemanager.eviction.policy import Room, TierName, expected_use, place
from plexrl.statemanager.store.catalog import Catalog, Described
from plexrl.statemanager.store.objects import StoredObject, Version
from plexrl.statemanager.store.tier import Tier
from plexrl.statemanager.store.versions.versions import VersionKind, encode_header
from plexrl.statemanager.transfer.copy.mover import Mover

HOST, NVME = TierName.HOST, TierName.NVME


@dataclass(slots=True, eq=False)
class BackgroundMove:
    """One that gives way to others: between two blocks it looks at `cancelled`."""

    deployment: str
    cancelled: threading.Event = field(default_factory=threading.Event)


class Rooms:
    """Makes room. Thread-safe."""

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
        self._turn = threading.Lock()
        self._copying = threading.Lock()
        self._idle = threading.Condition(catalog.lock)
        self._moves: set[BackgroundMove] = set()
        self._next_use: dict[str, float] = {}
        self.make_way: Callable[[], None] = _nothing
        """Gives up what is kept in host only in case it is of use."""

    def expect(self, deployment: str, next_use: float | None) -> None:
        """As `Store.expect`."""
        with self._catalog.lock:
            if next_use is None:
                self._next_use.pop(deployment, None)
            else:
                self._next_use[deployment] = next_use

    def now(self) -> float:
        """On the clock that `expect` speaks of."""
        return self._clock()

    def used(self, version: Version) -> None:
        """Count a version as used now; the catalog's lock is held."""
        version.last_use, version.last_use_s = self._catalog.tick(), self._clock()
        deployment = version.manifest.deployment
        if self._next_use.get(deployment, version.last_use_s + 1) <= version.last_use_s:
            # The prediction has come true; what follows is for whoever predicts to say.
            del self._next_use[deployment]

    def next_use(self, version: Version) -> float:
        """When a version is expected to be used; the catalog's lock is held."""
        if version.only_while_room:
            return math.inf
        predicted = None
        if version.manifest.kind == VersionKind.STATE:
            predicted = self._next_use.get(version.manifest.deployment)
        return expected_use(predicted, version.last_use_s, self._clock())

    def make(
        self,
        wanted: Described,
        needed_bytes: int,
        needed_nvme_bytes: int,
        superseded: Iterable[str] = (),
        *,
        host_only: bool = False,
    ) -> TierName:
        """Reserve bytes in a tier, after moving what must go; returns which tier.

        Raises:
            StateTierFullError: no tier has room, whatever is moved.
            StorageError: what had to be spilled could not be written.
        """
        catalog = self._catalog
        superseded = frozenset(superseded)
        with catalog.lock:
            if catalog.reserve(HOST, needed_bytes):
                return HOST
        with self._turn:
            self.cancel()
            self.make_way()
            while True:
                with catalog.lock:
                    found, members = residents(catalog, superseded, self.next_use)
                    host, nvme = (
                        Room(used_bytes=catalog.used_bytes[tier], bytes_max=catalog.bytes_max[tier])
                        for tier in (HOST, NVME)
                    )
                    placement = place(needed_bytes, found, host, nvme, needed_nvme_bytes)
                    if placement is None or placement.tier == NVME:
                        needless = self.only_while_room()
                        if not needless <= superseded:
                            superseded |= needless
                            continue
                    if placement is None or placement.tier == NVME:
                        clean = self._clean()
                        copies = catalog.sole_bytes(clean, NVME)
                        without = replace(nvme, used_bytes=nvme.used_bytes - copies)
                        better = place(needed_bytes, found, host, without, needed_nvme_bytes)
                        if better is not None and (placement is None or better.tier == HOST):
                            # One at a time, so that no more of them go than must.
                            catalog.unname(clean[0], NVME)
                            continue
                    if placement is None or (host_only and placement.tier == NVME):
                        raise catalog.full(wanted, needed_bytes)
                    for name in placement.drop:
                        catalog.drop(members[name])
                    nbytes = needed_bytes if placement.tier == HOST else needed_nvme_bytes
                    if not placement.spill and catalog.reserve(placement.tier, nbytes):
                        return placement.tier
                # What is needed is looked at again afterwards: a spilled version may have gained a
                # reader, and others may have taken room that was free.
                for name in placement.spill:
                    for member in members[name]:
                        self.spill(member)

    def take_free(self, tier: TierName, nbytes: int) -> bool:
        """Reserve bytes in a tier if they are free already."""
        with self._catalog.lock:
            return self._catalog.reserve(tier, nbytes)

    def spill(self, name: str) -> None:
        """Take a version out of the host tier, its bytes safe on NVMe first.

        Raises:
            StateTierFullError: NVMe has no room; the version stays where it is.
            StorageError: it cannot be written; the version stays where it is.
        """
        catalog = self._catalog
        with self._holding(name) as version:
            if version is None:
                return
            self.cancel()
            self._copy_to_nvme(version, None)
            with catalog.lock:
                if HOST in version.header_bytes:
                    catalog.unname(version, HOST)
        self._tiers[HOST].faults.reach("spill.done")

    def keep_copy(self, name: str) -> bool:
        """Write a copy of a version in host to NVMe, in the background; returns whether it is
        there.

        Raises:
            OperationCancelledError: something more urgent came.
            StorageError: it cannot be written.
        """
        with self._holding(name) as version:
            if version is None:
                return False
            with self.background(version.manifest.deployment) as move:
                self._copy_to_nvme(version, move.cancelled)
            return True

    def move_out(self, name: str) -> None:
        """Have a version on NVMe and no longer in host, in the background.

        Raises:
            OperationCancelledError: something more urgent came; it is in host.
            StorageError: NVMe has no room, or it cannot be written; it is in host.
        """
        catalog = self._catalog
        with self._holding(name) as version:
            if version is None:
                return
            with self.background(version.manifest.deployment) as move:
                self._copy_to_nvme(version, move.cancelled)
            with catalog.lock:
                if HOST in version.header_bytes:
                    catalog.unname(version, HOST)

    def only_while_room(self, tenant: str | None = None) -> frozenset[str]:
        """Names of a tenant's (absent: all) versions that are to go before anything else. The
        catalog's lock is held."""
        return frozenset(
            name
            for name, version in self._catalog.current.items()
            if version.only_while_room and tenant in (None, version.manifest.tenant)
        )

    def spill_all(self, versions: Iterable[Version]) -> list[str]:
        """Spill versions in this order; returns the names of those that had to stay."""
        left = []
        with self._turn:
            self.cancel()
            for version in versions:
                try:
                    self.spill(version.manifest.name)
                except PlexRLError:
                    left.append(version.manifest.name)
        return left

    @contextmanager
    def background(self, deployment: str) -> Iterator[BackgroundMove]:
        """A move that gives way, while the block runs."""
        move = BackgroundMove(deployment)
        with self._catalog.lock:
            self._moves.add(move)
        try:
            yield move
        finally:
            with self._catalog.lock:
                self._moves.discard(move)
                self._idle.notify_all()

    def cancel(self, deployment: str | None = None) -> None:
        """Have background moves (absent: all) end, and wait until they have."""
        with self._catalog.lock:
            chosen = {m for m in self._moves if deployment in (None, m.deployment)}
            for move in chosen:
                move.cancelled.set()
            self._idle.wait_for(lambda: not chosen & self._moves)

    @contextmanager
    def _holding(self, name: str) -> Iterator[Version | None]:
        """The version of that name, if it is in host, its bytes held there."""
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

    def _copy_to_nvme(self, version: Version, cancelled: threading.Event | None) -> None:
        """Have a version that is held in host on NVMe too."""
        catalog = self._catalog
        held: list[StoredObject] = []
        with self._copying:
            try:
                for found in dict.fromkeys(version.objects):
                    self._copy_object(version, found, cancelled)
                    held.append(found)
                self._name_on_nvme(version)
            finally:
                with catalog.lock:
                    catalog.release(held, NVME)

    def _name_on_nvme(self, version: Version) -> None:
        """Name a version on NVMe, whose objects are held there."""
        catalog = self._catalog
        record = version.record(NVME)
        nbytes = len(encode_header(record))
        if NVME in version.header_bytes:
            return
        if not self.take_free(NVME, nbytes):
            with catalog.lock:
                raise catalog.full(version.manifest, nbytes)
        try:
            self._tiers[NVME].prepare(record, "spill")
            with catalog.lock:
                # Under the lock: a version that is dropped now must not come back by this name.
                if version.retired:
                    self._tiers[NVME].withdraw(record)
                else:
                    self._tiers[NVME].commit(record, "spill")
                    catalog.named(version, NVME, nbytes)
                    nbytes = 0
        finally:
            with catalog.lock:
                catalog.give_back(NVME, nbytes)

    def _copy_object(
        self, version: Version, found: StoredObject, cancelled: threading.Event | None
    ) -> None:
        """Have an object on NVMe, and hold it there."""
        catalog = self._catalog
        with catalog.lock:
            if found.on_nvme:
                catalog.acquire([found], NVME)
                return
            if not catalog.reserve(NVME, found.file_bytes):
                raise catalog.full(version.manifest, found.file_bytes)
        try:
            digests = self._mover.host_to_nvme(found, cancelled)
        except BaseException:
            with catalog.lock:
                catalog.give_back(NVME, found.file_bytes)
            raise
        with catalog.lock:
            found.on_nvme, found.digests = True, digests
            catalog.acquire([found], NVME)

    def _clean(self) -> list[Version]:
        """Versions in host with a copy on NVMe, the first to be used first: they leave last."""
        found = [
            version
            for version in self._catalog.current.values()
            if len(version.header_bytes) == len(TierName) and not version.users
        ]
        return sorted(found, key=lambda v: (self.next_use(v), -v.last_use, v.manifest.name))


def _nothing() -> None:
    """There is nothing of that kind."""
