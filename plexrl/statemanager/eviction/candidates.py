"""What of the catalog could give way, as the choice of `residency` sees it.

Versions of one deployment that share objects leave the host tier together or not at all, since
moving one of them frees next to nothing. What is superseded among them counts by itself, with the
bytes that only superseded versions have a part in.
"""

from collections.abc import Callable, Collection, Sequence

from plexrl.statemanager.eviction.policy import Resident, TierName
from plexrl.statemanager.store.catalog import Catalog
from plexrl.statemanager.store.objects import StoredObject, Version


def residents(
    catalog: Catalog, superseded: Collection[str], next_use: Callable[[Version], float]
) -> tuple[list[Resident], dict[str, list[str]]]:
    """What may give way, and the names of the versions that each stands for.

    The catalog's lock is held.
    """
    found: list[Resident] = []
    members: dict[str, list[str]] = {}
    # What only a lower tier has can be dropped, if it is superseded; it is not spilled.
    for tier in TierName:
        there = [version for version in catalog.current.values() if version.tier == tier]
        for group in _sharing(there):
            stale = [version for version in group if version.manifest.name in superseded]
            kept = [version for version in group if version.manifest.name not in superseded]
            stale_bytes = catalog.sole_bytes(stale, tier) if stale else 0
            whole_bytes = catalog.sole_bytes(group, tier) if kept else 0
            for part, nbytes in ((stale, stale_bytes), (kept, whole_bytes - stale_bytes)):
                if not part:
                    continue
                name = min(version.manifest.name for version in part)
                members[name] = sorted(version.manifest.name for version in part)
                found.append(
                    Resident(
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


def spill_bytes(versions: Sequence[Version]) -> int:
    """What NVMe must take before these versions can leave the host tier."""
    lacking = [version for version in versions if TierName.NVME not in version.header_bytes]
    objects = {found for version in lacking for found in version.objects if not found.on_nvme}
    headers = sum(version.header_bytes[TierName.HOST] for version in lacking)
    return headers + sum(found.file_bytes for found in objects)


def _sharing(versions: Sequence[Version]) -> list[list[Version]]:
    """The versions in groups, any two of which share no object."""
    groups: dict[str, list[Version]] = {}
    owner: dict[StoredObject, str] = {}
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
