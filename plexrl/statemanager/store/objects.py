"""Objects: the immutable bytes that versions are made of, counted by who needs them."""

from dataclasses import dataclass, field
from enum import StrEnum

from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.host.free_ranges import Piece
from plexrl.statemanager.store.versions.versions import (
    Manifest,
    ObjectRecord,
    VersionRecord,
    padded,
)

ShareKey = tuple[str, str, int, str, str, int]
"""Tenant, deployment, seq, kind, section's key and size."""


class ObjectState(StrEnum):
    """How far an object has come."""

    PENDING = "pending"
    WHOLE = "whole"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class StoredObject:
    """Changed under the catalog's lock only."""

    id: str
    nbytes: int
    file_bytes: int
    """What it takes on NVMe."""
    share_key: ShareKey | None = None
    """Under which other ranks look for it; absent: nobody does."""
    state: ObjectState = ObjectState.PENDING
    pieces: tuple[Piece, ...] | None = None
    """Where in the host tier it lies; absent: it is not there."""
    on_nvme: bool = False
    digests: bytes = b""
    """Of its blocks; empty until somebody needed them."""
    references: dict[TierName, int] = field(
        default_factory=lambda: {TierName.HOST: 0, TierName.NVME: 0}
    )
    """In each tier: versions named there that have it, and whoever reads or writes it there."""

    def is_in(self, tier: TierName) -> bool:
        """Whether it lies in a tier."""
        return self.pieces is not None if tier == TierName.HOST else self.on_nvme

    def bytes_in(self, tier: TierName) -> int:
        """What it takes, or would take, in a tier."""
        return padded(self.nbytes) if tier == TierName.HOST else self.file_bytes

    def record(self, tier: TierName) -> ObjectRecord:
        """As a header in that tier names it."""
        pieces = (self.pieces or ()) if tier == TierName.HOST else ()
        return ObjectRecord(self.id, self.nbytes, pieces)


@dataclass(slots=True, eq=False)
class Version:
    """A stored version. Changed under the catalog's lock only."""

    manifest: Manifest
    objects: tuple[StoredObject, ...]
    last_use: int
    last_use_s: float
    header_bytes: dict[TierName, int] = field(default_factory=dict)
    """Of its headers; it is named in the tiers that are keys."""
    users: int = 0
    only_while_room: bool = False
    """An earlier version, to be dropped before anything else."""
    retired: bool = False
    """Its name no longer means it."""

    @property
    def tier(self) -> TierName:
        """Where it is read from."""
        return TierName.HOST if TierName.HOST in self.header_bytes else TierName.NVME

    def record(self, tier: TierName) -> VersionRecord:
        """What its header in a tier says."""
        return VersionRecord(self.manifest, tuple(found.record(tier) for found in self.objects))

    def bytes_in(self, tier: TierName) -> int:
        """What it takes in a tier with all that it shares."""
        return self.header_bytes.get(tier, 0) + sum(o.bytes_in(tier) for o in self.objects)


def share_keys(manifest: Manifest) -> list[ShareKey | None]:
    """For each section, what a replica of it is looked for under."""
    return [
        (
            manifest.tenant,
            manifest.deployment,
            manifest.seq,
            manifest.kind.value,
            section.share_key,
            section.nbytes,
        )
        if section.share_key
        else None
        for section in manifest.sections
    ]
