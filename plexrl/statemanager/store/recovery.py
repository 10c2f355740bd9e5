"""What a daemon finds of the one before it: whole versions, and memory and files to use again."""

import logging

from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.host.pool import HostPool
from plexrl.statemanager.store.catalog import Catalog
from plexrl.statemanager.store.nvme import NvmeObjects, file_bytes
from plexrl.statemanager.store.objects import ObjectState, StoredObject, Version, share_keys
from plexrl.statemanager.store.tier import Tier
from plexrl.statemanager.store.versions.versions import ObjectRecord, VersionRecord

LOG = logging.getLogger(__name__)


def recover(
    catalog: Catalog, tiers: dict[TierName, Tier], pool: HostPool, nvme: NvmeObjects, now: float
) -> None:
    """Fill an empty catalog from the directories; what no version needs is freed or deleted.

    A version whose object lost its file or its tail is kept: loading it says so.
    """
    objects: dict[str, StoredObject] = {}
    replaced: list[Version] = []
    with catalog.lock:
        for tier in (TierName.HOST, TierName.NVME):
            for record, header_bytes in tiers[tier].headers():
                if tier == TierName.HOST and not _claim(record, objects, pool):
                    LOG.warning("%s is no longer whole; removed", record.manifest.description)
                    tiers[tier].forget_version(record)
                    continue
                if tier == TierName.HOST:
                    pool.set_aside(header_bytes)
                replaced += _install(catalog, tier, record, header_bytes, objects, now)
        # Not before: one found later may share their objects, which would be gone by then.
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
    objects: dict[str, StoredObject],
    now: float,
) -> list[Version]:
    """Take a version in; returns what another of its name replaces, by now or by it."""
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
    catalog.clock = max(catalog.clock, manifest.ordinal)
    former = catalog.current.get(manifest.name)
    if former is not None and former.manifest.ordinal == manifest.ordinal:
        catalog.named(former, tier, header_bytes)
        return []
    version = Version(manifest, tuple(held), last_use=manifest.ordinal, last_use_s=now)
    catalog.named(version, tier, header_bytes)
    if former is not None and former.manifest.ordinal > manifest.ordinal:
        return [version]
    catalog.current[manifest.name] = version
    return [] if former is None else [former]


def _claim(record: VersionRecord, objects: dict[str, StoredObject], pool: HostPool) -> bool:
    """Have a version's pieces counted as in use, as far as another that shares them has not."""
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


def _object(record: ObjectRecord) -> StoredObject:
    return StoredObject(
        id=record.id,
        nbytes=record.nbytes,
        file_bytes=file_bytes(record.id, record.nbytes),
        state=ObjectState.WHOLE,
    )
