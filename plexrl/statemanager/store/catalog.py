"""Which versions and objects a node has, who needs them, and what they take of each tier.

Every method but `changed` and the lock itself is to be called with `lock` held, which is never held
during I/O on data.

Laws:

- What a name means is the version with the highest ordinal that was stored under it.
- An object is in a tier for as long as a version named there, or somebody who reads or writes it
  there, refers to it; then its bytes are given back at once.
- `used_bytes` counts objects, headers, and what was reserved for those being written.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from plexrl.errors import StateLostError, StateTierFullError
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.host.pool import HostPool
from plexrl.statemanager.store.nvme import NvmeObjects
from plexrl.statemanager.store.objects import ObjectState, ShareKey, StoredObject, Version
from plexrl.statemanager.store.tier import Tier
from plexrl.statemanager.store.versions.changes import Changes
from plexrl.statemanager.store.versions.versions import VersionRecord


class Described(Protocol):
    """What needs room, for messages."""

    @property
    def description(self) -> str: ...


class Catalog:
    """The node's versions by name."""

    def __init__(
        self,
        tiers: dict[TierName, Tier],
        bytes_max: dict[TierName, int],
        pool: HostPool,
        nvme: NvmeObjects,
    ) -> None:
        self.lock = threading.Lock()
        self.whole = threading.Condition(self.lock)
        """Notified when an object ceases to be pending."""
        self.current: dict[str, Version] = {}
        self.shared: dict[ShareKey, StoredObject] = {}
        self.bytes_max = bytes_max
        self.used_bytes = {TierName.HOST: 0, TierName.NVME: 0}
        self.clock = 0
        self.changes = Changes()
        self._tiers = tiers
        self._pool = pool
        self._nvme = nvme

    def tick(self) -> int:
        """A number higher than any before."""
        self.clock += 1
        return self.clock

    def version(self, name: str, description: str) -> Version:
        """The version of that name. Raises StateLostError: there is none."""
        found = self.current.get(name)
        if found is None:
            raise StateLostError(f"{description} is not on this node: restore a checkpoint")
        return found

    def free_bytes(self, tier: TierName) -> int:
        """What may still be reserved."""
        return self.bytes_max[tier] - self.used_bytes[tier]

    def reserve(self, tier: TierName, nbytes: int) -> bool:
        """Set bytes of the bound aside, if they are free."""
        if nbytes > self.free_bytes(tier):
            return False
        self.used_bytes[tier] += nbytes
        return True

    def give_back(self, tier: TierName, nbytes: int) -> None:
        """Undo a reservation."""
        self.used_bytes[tier] -= nbytes

    def acquire(self, objects: Iterable[StoredObject], tier: TierName) -> None:
        """Hold objects in place in a tier."""
        for found in objects:
            found.references[tier] += 1

    def release(self, objects: Iterable[StoredObject], tier: TierName) -> None:
        """Let go of objects in a tier; the last one to do so has their bytes given back."""
        for found in objects:
            found.references[tier] -= 1
            if found.references[tier] or not found.is_in(tier):
                continue
            self.used_bytes[tier] -= found.bytes_in(tier)
            if tier == TierName.HOST:
                assert found.pieces is not None
                self._pool.free(found.pieces)
                found.pieces = None
            else:
                self._nvme.remove(found.id)
                found.on_nvme = False
            if not found.on_nvme and found.pieces is None:
                self._unshare(found)

    def abandon(self, found: StoredObject, tier: TierName) -> None:
        """Undo what was written of an object that nobody refers to; its reservation stays."""
        if tier == TierName.HOST and found.pieces is not None:
            self._pool.free(found.pieces)
            found.pieces = None
        if tier == TierName.NVME and found.on_nvme:
            self._nvme.remove(found.id)
            found.on_nvme = False

    def settle(self, found: StoredObject, state: ObjectState) -> None:
        """Say what became of an object that was being written."""
        found.state = state
        if state == ObjectState.FAILED:
            self._unshare(found)
        self.whole.notify_all()

    def install(self, version: Version) -> None:
        """Let a version be what its name means; the one that was is dropped."""
        self.drop([version.manifest.name])
        self.current[version.manifest.name] = version

    def named(self, version: Version, tier: TierName, header_bytes: int) -> None:
        """Count a header that was written, its bytes reserved and its objects held before."""
        version.header_bytes[tier] = header_bytes
        self.changes.note(version.manifest)
        self.acquire(version.objects, tier)
        if version.retired:
            # Dropped meanwhile, before this header was known of.
            self.unname(version, tier)

    def unname(self, version: Version, tier: TierName) -> None:
        """Take a version out of a tier."""
        self._tiers[tier].forget_version(VersionRecord(version.manifest, ()))
        nbytes = version.header_bytes.pop(tier)
        self.changes.note(version.manifest)
        self._tiers[tier].faults.reach("drop.unlinked")
        self.used_bytes[tier] -= nbytes
        if tier == TierName.HOST:
            self._pool.set_aside(-nbytes)
        self.release(version.objects, tier)

    def drop(self, names: Iterable[str]) -> None:
        """Give versions up; an object in use goes when its last user is done."""
        for name in names:
            version = self.current.pop(name, None)
            if version is not None:
                self.retire(version)

    def retire(self, version: Version) -> None:
        """Delete a version that no name means."""
        version.retired = True
        # From NVMe first: a crash in between must not bring back what host no longer has.
        for tier in (TierName.NVME, TierName.HOST):
            if tier in version.header_bytes:
                self.unname(version, tier)

    def sole_bytes(self, versions: Sequence[Version], tier: TierName) -> int:
        """What these versions take in a tier that no other version has a part in."""
        counts: dict[StoredObject, int] = {}
        for version in versions:
            if tier in version.header_bytes:
                for found in version.objects:
                    counts[found] = counts.get(found, 0) + 1
        headers = sum(version.header_bytes.get(tier, 0) for version in versions)
        return headers + sum(
            found.bytes_in(tier)
            for found, count in counts.items()
            if found.references[tier] == count
        )

    def full(self, wanted: Described, nbytes: int) -> StateTierFullError:
        """What to raise when nothing makes room."""
        host, nvme = TierName.HOST, TierName.NVME
        return StateTierFullError(
            f"{wanted.description} needs {nbytes} bytes; the host tier holds "
            f"{self.used_bytes[host]} of {self.bytes_max[host]} and the NVMe tier "
            f"{self.used_bytes[nvme]} of {self.bytes_max[nvme]}, and what they hold cannot make "
            "way: end a job or raise a bound; the state stays where it was",
            needed_bytes=nbytes,
        )

    def _unshare(self, found: StoredObject) -> None:
        if found.share_key is not None and self.shared.get(found.share_key) is found:
            del self.shared[found.share_key]
