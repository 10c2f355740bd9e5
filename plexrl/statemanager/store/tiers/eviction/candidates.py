"""Eviction candidates of a catalog, for `plexrl.statemanager.store.tiers.eviction.policy`. Pure.

Versions that share objects are evicted from the host tier together, because evicting one of them
frees almost nothing. Superseded versions of such a group are a candidate of their own, with the
bytes that only superseded versions refer to.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from plexrl.statemanager.store.tiers.eviction.policy import EvictionCandidate, TierName

if TYPE_CHECKING:
    from plexrl.statemanager.store.objects import SharedObject, Version
    from plexrl.statemanager.store.versions.catalog import Catalog


def eviction_candidates(
    catalog: "Catalog", superseded: Collection[str], next_use: Callable[["Version"], float]
) -> tuple[list[EvictionCandidate], dict[str, list[str]]]:
    """The candidates, and the names of each candidate's versions. The catalog's lock is held."""
    found: list[EvictionCandidate] = []
    members: dict[str, list[str]] = {}
    # A version that is on NVMe only can be dropped if it is superseded, but not spilled.
    for tier in TierName:
        in_tier = [version for version in catalog.current.values() if version.tier == tier]
        for group in _groups_sharing_objects(in_tier):
            stale = [version for version in group if version.manifest.name in superseded]
            kept = [version for version in group if version.manifest.name not in superseded]
            stale_bytes = catalog.exclusive_bytes(stale, tier) if stale else 0
            whole_bytes = catalog.exclusive_bytes(group, tier) if kept else 0
            for part, nbytes in ((stale, stale_bytes), (kept, whole_bytes - stale_bytes)):
                if not part:
                    continue
                name = min(version.manifest.name for version in part)
                members[name] = sorted(version.manifest.name for version in part)
                found.append(
                    EvictionCandidate(
                        name=name,
                        tier=tier,
                        nbytes=nbytes,
                        last_use=max(version.last_use for version in part),
                        next_use=min(next_use(version) for version in part),
                        spill_bytes=spill_bytes(part),
                        in_use=any(version.users for version in group),
                        superseded=part is stale,
                    )
                )
    return found, members


def spill_bytes(versions: Sequence["Version"]) -> int:
    """Bytes to write to NVMe before these versions can leave the host tier."""
    without_copy = [version for version in versions if TierName.NVME not in version.header_bytes]
    objects = {found for version in without_copy for found in version.objects if not found.on_nvme}
    headers = sum(version.header_bytes[TierName.HOST] for version in without_copy)
    return headers + sum(found.file_bytes for found in objects)


def _groups_sharing_objects(versions: Sequence["Version"]) -> list[list["Version"]]:
    """Groups of versions; versions of different groups share no object."""
    groups: dict[str, list[Version]] = {}
    owner: dict[SharedObject, str] = {}
    for version in versions:
        name = version.manifest.name
        groups[name] = [version]
        for found in version.objects:
            other = owner.setdefault(found, name)
            if found.share_key is None or other == name or other not in groups:
                continue
            merged = groups.pop(other) + groups.pop(name)
            groups[name] = merged
            for member in merged:
                for shared in member.objects:
                    owner[shared] = name
    return list(groups.values())
