"""Index of a node's versions and objects, with reference counts and the bytes used per tier.

Callers hold `lock` in every method. The lock is never held during I/O on data.

Invariants:

- A name refers to the version with the highest ordinal that was stored under it.
- An object stays in a tier while a version with a header there, a reader or a writer refers to it.
  Then its bytes are freed at once.
- `used_bytes` counts objects, headers, and reservations for those that are being written.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from plexrl.errors import StateLostError, StateTierFullError
from plexrl.statemanager.layout.versions import VersionRecord
from plexrl.statemanager.store.objects import ObjectState, SharedObject, ShareKey, Version
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.host.pool import HostPool
from plexrl.statemanager.store.tiers.nvme import NvmeObjects
from plexrl.statemanager.store.tiers.tier import Tier
from plexrl.statemanager.store.versions.changes import VersionChanges


class Described(Protocol):
    """Anything that needs space and has a description for error messages."""

    @property
    def description(self) -> str: ...


class Catalog:
    """The node's versions by name, and objects by share key."""

    def __init__(
        self,
        tiers: dict[TierName, Tier],
        bytes_max: dict[TierName, int],
        pool: HostPool,
        nvme: NvmeObjects,
    ) -> None:
        self.lock = threading.Lock()
        self.object_finished = threading.Condition(self.lock)
        """Notified when an object is no longer pending."""
        self.current: dict[str, Version] = {}
        self.shared: dict[ShareKey, SharedObject] = {}
        self.bytes_max = bytes_max
        self.used_bytes = {TierName.HOST: 0, TierName.NVME: 0}
        self.last_ordinal = 0
        self.changes = VersionChanges()
        self._tiers = tiers
        self._pool = pool
        self._nvme = nvme

    def next_ordinal(self) -> int:
        """A number higher than all previous ones."""
        self.last_ordinal += 1
        return self.last_ordinal

    def version(self, name: str, description: str) -> Version:
        """The version of a name. Raises StateLostError: there is no such version."""
        found = self.current.get(name)
        if found is None:
            raise StateLostError(f"{description} is not on this node: restore a checkpoint")
        return found

    def free_bytes(self, tier: TierName) -> int:
        """Unreserved bytes of a tier."""
        return self.bytes_max[tier] - self.used_bytes[tier]

    def reserve(self, tier: TierName, nbytes: int) -> bool:
        """Reserve bytes of a tier if they are free; returns whether they were."""
        if nbytes > self.free_bytes(tier):
            return False
        self.used_bytes[tier] += nbytes
        return True

    def unreserve(self, tier: TierName, nbytes: int) -> None:
        """Undo a reservation."""
        self.used_bytes[tier] -= nbytes

    def acquire(self, objects: Iterable[SharedObject], tier: TierName) -> None:
        """Add a reference to each object in a tier."""
        for found in objects:
            found.references[tier] += 1

    def release(self, objects: Iterable[SharedObject], tier: TierName) -> None:
        """Drop a reference to each object in a tier; frees objects without references."""
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

    def discard_written(self, found: SharedObject, tier: TierName) -> None:
        """Free what was written of an unreferenced object; its reservation stays."""
        if tier == TierName.HOST and found.pieces is not None:
            self._pool.free(found.pieces)
            found.pieces = None
        if tier == TierName.NVME and found.on_nvme:
            self._nvme.remove(found.id)
            found.on_nvme = False

    def finish_object(self, found: SharedObject, state: ObjectState) -> None:
        """Set the final state of an object that was being written."""
        found.state = state
        if state == ObjectState.FAILED:
            self._unshare(found)
        self.object_finished.notify_all()

    def set_current(self, version: Version) -> None:
        """Make a version the current one of its name; drops the previous one."""
        self.drop([version.manifest.name])
        self.current[version.manifest.name] = version

    def add_header(self, version: Version, tier: TierName, header_bytes: int) -> None:
        """Record a written header. The caller has reserved its bytes and referenced its objects."""
        version.header_bytes[tier] = header_bytes
        self.changes.note(version.manifest)
        self.acquire(version.objects, tier)
        if version.retired:
            # The version was dropped before this header was recorded.
            self.remove_header(version, tier)

    def remove_header(self, version: Version, tier: TierName) -> None:
        """Delete a version's header in a tier and release its objects there."""
        self._tiers[tier].delete_header(VersionRecord(version.manifest, ()))
        nbytes = version.header_bytes.pop(tier)
        self.changes.note(version.manifest)
        self._tiers[tier].faults.reach("drop.unlinked")
        self.used_bytes[tier] -= nbytes
        if tier == TierName.HOST:
            self._pool.reserve_other(-nbytes)
        self.release(version.objects, tier)

    def drop(self, names: Iterable[str]) -> None:
        """Drop versions; an object in use is freed after its last user."""
        for name in names:
            version = self.current.pop(name, None)
            if version is not None:
                self.retire(version)

    def retire(self, version: Version) -> None:
        """Delete all headers of a version that is not current."""
        version.retired = True
        # NVMe first: after a crash in between, recovery must not find only the NVMe copy.
        for tier in (TierName.NVME, TierName.HOST):
            if tier in version.header_bytes:
                self.remove_header(version, tier)

    def exclusive_bytes(self, versions: Sequence[Version], tier: TierName) -> int:
        """Bytes in a tier that only these versions refer to."""
        counts: dict[SharedObject, int] = {}
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

    def full_error(self, wanted: Described, nbytes: int) -> StateTierFullError:
        """The error for a version or allocation that fits in no tier."""
        host, nvme = TierName.HOST, TierName.NVME
        return StateTierFullError(
            f"{wanted.description} needs {nbytes} bytes; the host tier holds "
            f"{self.used_bytes[host]} of {self.bytes_max[host]} and the NVMe tier "
            f"{self.used_bytes[nvme]} of {self.bytes_max[nvme]}, and not enough can be evicted: "
            "end a job or raise host_bytes or nvme_bytes; the state stays where it was",
            needed_bytes=nbytes,
        )

    def _unshare(self, found: SharedObject) -> None:
        if found.share_key is not None and self.shared.get(found.share_key) is found:
            del self.shared[found.share_key]
