"""Tiers of each deployment's newest state: the bytes that a context switch has to read, and the
versions that survive a power cut."""

from collections import Counter
from dataclasses import dataclass

from plexrl.statemanager.layout.versions import VersionKind
from plexrl.statemanager.store.objects import Version
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.versions.catalog import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLocation:
    """Location of a deployment's newest version on this node."""

    deployment: str
    seq: int
    """0, with no bytes, if the deployment has no state on this node."""
    host_bytes: int
    nvme_bytes: int
    """Bytes that are on NVMe only."""
    on_nvme: tuple[int, ...]
    """Versions of which NVMe has all shards: as many as there are of any version."""


def state_locations(catalog: Catalog, since: int) -> list[StateLocation]:
    """Locations of the deployments that changed after number `since`. The catalog's lock is
    held."""
    changed = catalog.changes.since(since)
    versions: dict[str, list[Version]] = {name: [] for name in changed}
    if changed:
        for version in catalog.current.values():
            manifest = version.manifest
            if manifest.kind == VersionKind.STATE and manifest.deployment in versions:
                versions[manifest.deployment].append(version)
    found = [_location(name, versions[name]) for name in sorted(changed)]
    catalog.changes.forget([name for name in changed if not versions[name]])
    return found


def _location(deployment: str, versions: list[Version]) -> StateLocation:
    seq = max((version.manifest.seq for version in versions), default=0)
    tiers: dict[TierName, dict[str, int]] = {tier: {} for tier in TierName}
    shards = Counter(version.manifest.seq for version in versions)
    whole = max(shards.values(), default=0)
    stored = Counter(v.manifest.seq for v in versions if TierName.NVME in v.header_bytes)
    for version in versions:
        if version.manifest.seq == seq:
            # Objects that ranks share are read once.
            tiers[version.tier].update((found.id, found.nbytes) for found in version.objects)
    return StateLocation(
        deployment=deployment,
        seq=seq,
        host_bytes=sum(tiers[TierName.HOST].values()),
        nvme_bytes=sum(tiers[TierName.NVME].values()),
        on_nvme=tuple(sorted(each for each in stored if stored[each] == whole)),
    )
