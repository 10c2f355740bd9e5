"""Recovery of the versions that a previous daemon left in the directories."""

import logging

from plexrl.statemanager.layout.versions import ObjectRecord, VersionRecord
from plexrl.statemanager.store.objects import ObjectState, SharedObject, Version, share_keys
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.host.pool import HostPool
from plexrl.statemanager.store.tiers.nvme import NvmeObjects, file_bytes
from plexrl.statemanager.store.tiers.tier import Tier
from plexrl.statemanager.store.versions.catalog import Catalog

LOG = logging.getLogger(__name__)


def recover(
    catalog: Catalog, tiers: dict[TierName, Tier], pool: HostPool, nvme: NvmeObjects, now: float
) -> None:
    """Fill an empty catalog from the directories; frees or deletes what no version refers to.

    A version with a damaged or missing object is kept: loading it reports the damage.
    """
    objects: dict[str, SharedObject] = {}
    replaced: list[Version] = []
    with catalog.lock:
        for tier in (TierName.HOST, TierName.NVME):
            for record, header_bytes in tiers[tier].headers():
                if tier == TierName.HOST and not _claim(record, objects, pool):
                    LOG.warning("%s is incomplete and was removed", record.manifest.description)
                    tiers[tier].delete_header(record)
                    continue
                if tier == TierName.HOST:
                    pool.reserve_other(header_bytes)
                replaced += _install(catalog, tier, record, header_bytes, objects, now)
        # Only now: a version found later may share their objects.
        for version in replaced:
            catalog.retire(version)
        known = {found.id for found in objects.values() if found.on_nvme}
        for object_id in [found for found in nvme.ids() if found not in known]:
            nvme.remove(object_id)


def _install(
    catalog: Catalog,
    tier: TierName,
    record: VersionRecord,
    header_bytes: int,
    objects: dict[str, SharedObject],
    now: float,
) -> list[Version]:
    """Add a version; returns the version that is superseded, this one or another of its name."""
    manifest = record.manifest
    held = []
    for found, key in zip(record.objects, share_keys(manifest), strict=True):
        known = objects.setdefault(found.id, _object(found))
        known.share_key = key
        if not known.references[tier] and known not in held:
            catalog.used_bytes[tier] += known.bytes_in(tier)
            if tier == TierName.NVME:
                known.on_nvme = True
            else:
                known.pieces = found.pieces
        if key is not None:
            catalog.shared.setdefault(key, known)
        held.append(known)
    catalog.used_bytes[tier] += header_bytes
    catalog.last_ordinal = max(catalog.last_ordinal, manifest.ordinal)
    previous = catalog.current.get(manifest.name)
    if previous is not None and previous.manifest.ordinal == manifest.ordinal:
        catalog.add_header(previous, tier, header_bytes)
        return []
    version = Version(manifest, tuple(held), last_use=manifest.ordinal, last_use_s=now)
    catalog.add_header(version, tier, header_bytes)
    if previous is not None and previous.manifest.ordinal > manifest.ordinal:
        return [version]
    catalog.current[manifest.name] = version
    return [] if previous is None else [previous]


def _claim(record: VersionRecord, objects: dict[str, SharedObject], pool: HostPool) -> bool:
    """Claim a version's pieces in the pool, except those that another version claimed."""
    claimed: list[ObjectRecord] = []
    for found in {found.id: found for found in record.objects}.values():
        if found.id in objects:
            continue
        if not pool.claim(found.pieces, record.manifest.tenant):
            for one in claimed:
                pool.free(one.pieces)
            return False
        claimed.append(found)
    return True


def _object(record: ObjectRecord) -> SharedObject:
    return SharedObject(
        id=record.id,
        nbytes=record.nbytes,
        file_bytes=file_bytes(record.id, record.nbytes),
        state=ObjectState.WHOLE,
    )
