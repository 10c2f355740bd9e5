"""Stored objects: the immutable, reference-counted bytes of versions."""

from dataclasses import dataclass, field
from enum import StrEnum

from plexrl.statemanager.layout.ranges import Piece
from plexrl.statemanager.layout.versions import (
    Manifest,
    ObjectRecord,
    VersionRecord,
    padded,
)
from plexrl.statemanager.store.tiers.eviction.policy import TierName

ShareKey = tuple[str, str, int, str, str, int]
"""Tenant, deployment, sequence number, kind, section's share key, and size in bytes."""


class ObjectState(StrEnum):
    """Whether an object is being written, complete or failed."""

    PENDING = "pending"
    WHOLE = "whole"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class SharedObject:
    """The bytes of one section. Changed only under the catalog's lock."""

    id: str
    nbytes: int
    file_bytes: int
    """Size of the object's file on NVMe."""
    share_key: ShareKey | None = None
    """Key by which other ranks find the object; absent: it is not shared."""
    state: ObjectState = ObjectState.PENDING
    pieces: tuple[Piece, ...] | None = None
    """Location in the host tier; absent: it is not there."""
    on_nvme: bool = False
    digests: bytes = b""
    """Digests of the blocks; empty until they are computed."""
    device_digest: str = ""
    """As in the section that it was made for."""
    references: dict[TierName, int] = field(
        default_factory=lambda: {TierName.HOST: 0, TierName.NVME: 0}
    )
    """References per tier: versions with a header there, readers and writers."""

    def is_in(self, tier: TierName) -> bool:
        """Whether the object is in a tier."""
        return self.pieces is not None if tier == TierName.HOST else self.on_nvme

    def bytes_in(self, tier: TierName) -> int:
        """Bytes that the object needs in a tier."""
        return padded(self.nbytes) if tier == TierName.HOST else self.file_bytes

    def record(self, tier: TierName) -> ObjectRecord:
        """The object's record in a header of that tier."""
        pieces = (self.pieces or ()) if tier == TierName.HOST else ()
        return ObjectRecord(self.id, self.nbytes, pieces)


@dataclass(slots=True, eq=False)
class Version:
    """A stored version. Changed only under the catalog's lock."""

    manifest: Manifest
    objects: tuple[SharedObject, ...]
    last_use: int
    last_use_s: float
    header_bytes: dict[TierName, int] = field(default_factory=dict)
    """Size of the version's header in each tier that has one."""
    users: int = 0
    """Readers of the version."""
    is_expendable: bool = False
    """An earlier version, which is dropped first when space is short."""
    retired: bool = False
    """The version is no longer the current one of its name."""

    @property
    def tier(self) -> TierName:
        """Tier that the version is read from."""
        return TierName.HOST if TierName.HOST in self.header_bytes else TierName.NVME

    def record(self, tier: TierName) -> VersionRecord:
        """Contents of the version's header in a tier."""
        return VersionRecord(self.manifest, tuple(found.record(tier) for found in self.objects))

    def bytes_in(self, tier: TierName) -> int:
        """Bytes in a tier, shared objects included."""
        return self.header_bytes.get(tier, 0) + sum(o.bytes_in(tier) for o in self.objects)


def share_keys(manifest: Manifest) -> list[ShareKey | None]:
    """Share key of each section; None for a section that is not shared."""
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
