"""Requests about checkpoints over the StateManager's socket."""

from enum import StrEnum

import msgspec

from plexrl.statemanager.checkpoint.format.plan import SHARD_BYTES_MAX, CheckpointFormat
from plexrl.statemanager.checkpoint.format.record import TensorRecord
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.protocol.messages import Request
from plexrl.wire.messages.cluster_views import ErrorView


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


class WriteFiles(msgspec.Struct, frozen=True, kw_only=True, tag="write_files"):
    """Asks the StateManager of another node to write some files of a checkpoint in the background.
    The work ends with the connection."""

    deployment: str
    seq: int
    name: str
    node: str
    """Node that has announced the checkpoint."""
    sources: tuple[str, ...]
    """Addresses of all StateManagers that hold ranks' versions."""
    stamps: tuple[str, ...]
    """Stamps of the ranks' versions, by rank."""
    format: CheckpointFormat
    model_dtype: str | None
    model_type: str
    shard_bytes_max: int
    files: tuple[str, ...] = ()
    """Paths, relative to the checkpoint, of its plan, which every node makes alike."""


class AskFiles(msgspec.Struct, frozen=True, kw_only=True, tag="ask_files"):
    """Asks for the progress of the last `WriteFiles` of this connection."""

    stop: bool = False
    """Write nothing more; answered when nothing is written any more."""


class FilesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a `WriteFiles`."""

    bytes_done: int
    is_over: bool
    tensors: tuple[TensorRecord, ...]
    """What is in the files that were flushed to the disk since the last report."""
    error: ErrorView | None
    """Why it could not write all of them."""


class CheckpointStatus(Request, frozen=True, kw_only=True):
    """Report the checkpoints of a deployment's job, including complete ones."""

    deployment: str
    name: str | None = None
    """Absent: all checkpoints of the job."""


class CancelCheckpoint(Request, frozen=True, kw_only=True):
    """Cancel a checkpoint that is not durable yet."""

    deployment: str
    name: str
