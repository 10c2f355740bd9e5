"""What is asked of a StateManager about checkpoints, over its socket."""

from dataclasses import dataclass
from enum import StrEnum

from plexrl.statemanager.checkpoint.format.plan import SHARD_BYTES_MAX, CheckpointFormat
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.protocol.messages import Request
from plexrl.statemanager.store.versions.versions import Manifest
from plexrl.statemanager.transfer.copy.mapped_memory import Region


class CheckpointState(StrEnum):
    """How far a checkpoint is."""

    WAITING = "waiting"
    """Its version is pinned; another checkpoint is being written."""
    WRITING = "writing"
    DURABLE = "durable"
    """It is whole and on the disk."""
    FAILED = "failed"
    """Nothing of it remains; ask again."""
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (self.WAITING, self.WRITING)


class UploadState(StrEnum):
    """How far a checkpoint's upload is."""

    NONE = "none"
    """It was not asked for."""
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    """Given up after several attempts; the daemon tries again when it starts."""


class WriteCheckpoint(Request, frozen=True, kw_only=True):
    """Pin version `seq` of every rank and write it in the background; answered once it is pinned.

    A tar file of small files to lie beside the tensors may come along as a descriptor. Asked again
    by the same one for the same versions, it joins what is under way, or finds it done.
    """

    deployment: str
    seq: int
    name: str
    sources: tuple[str, ...] = ()
    """Sockets of the other StateManagers, on this machine, that have ranks' versions."""
    stamps: tuple[str, ...] | None = None
    """Of the ranks' versions, by rank; absent: whatever has that seq."""
    format: CheckpointFormat = CheckpointFormat.BOTH
    model_dtype: str | None = None
    """`BF16` casts what `transformers` loads; absent: as stored."""
    shard_bytes_max: int = SHARD_BYTES_MAX
    overwrite: bool = False
    asked_by: str = ""
    """Tells a repeated request from a new one, which a checkpoint of that name stands in the way
    of."""
    step: int | None = None
    trainer_step: int = 0
    """Optimizer steps in the parameters."""
    keep: bool = False
    retention: RetentionPolicy | None = None
    """Applied to the job's other checkpoints once this one is whole."""
    upload: bool = False


class PinVersions(Request, frozen=True, kw_only=True):
    """Descriptors of a version's files, one a rank, held in place for the connection."""

    deployment: str
    seq: int


class CheckpointStatus(Request, frozen=True, kw_only=True):
    """How far a deployment's job's checkpoints are; those on the disk are listed too."""

    deployment: str
    name: str | None = None
    """Absent: all of the job's."""


class CancelCheckpoint(Request, frozen=True, kw_only=True):
    """Give up a checkpoint that is not durable yet."""

    deployment: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedVersion:
    """One rank's version."""

    manifest: Manifest
    regions: tuple[Region, ...]
    """All of the data, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """One checkpoint, as a StateManager knows it."""

    job: str
    name: str
    path: str
    state: CheckpointState
    seq: int
    step: int
    bytes_done: int
    bytes_total: int
    seconds: float
    """Of writing."""
    as_of: float
    """When it was asked for, or lay on the disk, in seconds since the epoch: of what several nodes
    say of one name the newest counts."""
    upload: UploadState = UploadState.NONE
    error: dict[str, object] | None = None
    """Why it failed, as `PlexRLError.to_wire`."""
    upload_error: str | None = None
