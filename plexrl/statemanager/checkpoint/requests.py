"""Requests about checkpoints over the StateManager's socket."""

from enum import StrEnum

from plexrl.statemanager.checkpoint.format.plan import SHARD_BYTES_MAX, CheckpointFormat
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.protocol.messages import Request


class CheckpointState(StrEnum):
    """Progress of a checkpoint."""

    WAITING = "waiting"
    """Its version is pinned; another checkpoint is being written."""
    WRITING = "writing"
    DURABLE = "durable"
    """It is complete."""
    FAILED = "failed"
    """The checkpoint failed and left no files; request it again."""
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (self.WAITING, self.WRITING)


class WriteCheckpoint(Request, frozen=True, kw_only=True):
    """Pin version `seq` of every rank and write it in the background; answered once it is pinned.

    The request may carry a descriptor of a tar file with small files to add. Repeating a request
    (equal `asked_by` and versions) joins the running checkpoint or returns the finished one.
    """

    deployment: str
    seq: int
    name: str
    sources: tuple[str, ...] = ()
    """Addresses of other StateManagers that hold ranks' versions."""
    stamps: tuple[str, ...] | None = None
    """Stamps of the ranks' versions, by rank; absent: any version with that seq."""
    format: CheckpointFormat = CheckpointFormat.BOTH
    model_dtype: str | None = None
    """Dtype of the files that `transformers` loads, for example `BF16`; absent: as stored."""
    model_type: str = ""
    """Model type of `transformers`, whose published names those files get; empty: those of the
    state."""
    shard_bytes_max: int = SHARD_BYTES_MAX
    overwrite: bool = False
    asked_by: str = ""
    """Id of the request: a repeated request has the same id. A new one fails if the name exists."""
    step: int | None = None
    trainer_step: int = 0
    """Optimizer steps in the parameters."""
    keep: bool = False
    retention: RetentionPolicy | None = None
    """Applied to the job's other checkpoints when this one is complete."""


class CheckpointStatus(Request, frozen=True, kw_only=True):
    """Report the checkpoints of a deployment's job, including complete ones."""

    deployment: str
    name: str | None = None
    """Absent: all checkpoints of the job."""


class CancelCheckpoint(Request, frozen=True, kw_only=True):
    """Cancel a checkpoint that is not durable yet."""

    deployment: str
    name: str
