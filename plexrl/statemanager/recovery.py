"""What a daemon finds of the one before it: whole versions, and memory and files to use again."""

import logging

from plexrl.statemanager.catalog import Catalog
from plexrl.statemanager.host_pool import HostPool
from plexrl.statemanager.nvme import NvmeObjects, file_bytes
from plexrl.statemanager.objects import ObjectState, StoredObject, Version, share_keys
from plexrl.statemanager.residency import TierName
from plexrl.statemanager.tier import Tier
from plexrl.statemanager.versions import ObjectRecord, VersionRecord

LOG = logging.getLogger(__name__)


def recover(
    catalog: Catalog, tiers: dict[TierName, Tier], pool: HostPool, nvme: NvmeObjects, now: float
) -> None:
    """Fill an empty catalog from the directories; what no version needs is freed or deleted.

    Of headers of one name those of the highest ordinal count; the others are deleted before any
    object is looked at, because versions that are kept may share objects with those that are not.
    A version whose object lost its file or its tail is kept: loading it says so.
    """
    objects: dict[str, StoredObject] = {}
    found = [(tier, *header) for tier in TierName for header in tiers[tier].headers()]
    # Host before NVMe where a version is in both.
    found.sort(key=lambda one: -one[1].manifest.ordinal)
    with catalog.lock:
        for tier, record, header_bytes in found:
            manifest = record.manifest
            catalog.clock = max(catalog.clock, manifest.ordinal)
            newer = catalog.current.get(manifest.name)
            if newer is not None and newer.manifest.ordinal > manifest.ordinal:
                tiers[tier].forget_version(record)
                continue
            if tier == TierName.HOST:
                if not _claim(record, objects, pool):
                    LOG.warning("%s is no longer whole; removed", manifest.description)
                    tiers[tier].forget_version(record)
                    continue
                pool.set_aside(header_bytes)
            _install(catalog, tier, record, header_bytes, objects, now)
        pool.remove_unclaimed()
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
) -> None:
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
    version = catalog.current.get(manifest.name)
    if version is None:
        version = Version(manifest, tuple(held), last_use=manifest.ordinal, last_use_s=now)
        catalog.install(version)
    catalog.named(version, tier, header_bytes)


def _claim(record: VersionRecord, objects: dict[str, StoredObject], pool: HostPool) -> bool:
    """Have a version's pieces counted as in use, as far as another that shares them has not."""
    claimed: list[ObjectRecord] = []
    for found in {found.id: found for found in record.objects}.values():
        if found.id in objects and objects[found.id].pieces is not None:
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
