"""Commands of the scheduler core to its shell: imperative, plain values, safe to repeat.

A shell (live service or simulator) executes each command and reports the outcome as an event. After
a restart the core sends all commands again whose outcome is unknown. A receiver answers a repeated
command with the outcome of the first one.

A run is an operation that the scheduler starts, as routers and workers receive it. There is one
type for each kind of operation. Its tag, the field `kind` on the wire, is the name of the kind.
Runs are made often, so their fields are passed by position: by keyword it takes 1.5 µs instead of
0.3 µs. `gc` is off because no reference cycle can go through a run.
"""

from typing import Any, ClassVar

import msgspec

from plexrl.ids import (
    BlobRef,
    DeploymentId,
    FencingToken,
    GroupId,
    JobId,
    NodeId,
    OperationId,
    TenantId,
)
from plexrl.wire.operations import (
    AdamParams,
    CheckpointParams,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    OperationKind,
    SyncWeightsParams,
)

RunName = tuple[str, int]
"""Operation id and fencing token: names one run of an operation."""


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all commands. The tag is the name of the class, under the key `type`."""


class RankPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank of a WPG runs."""

    rank: int
    node: NodeId
    gpu: int
    """Index of the GPU on its node."""


class LaunchWorkers(Command, frozen=True, kw_only=True):
    """Start the worker processes of one WPG, each on the agent of its node."""

    deployment: DeploymentId
    tenant: TenantId
    """Owner; the workers' StateManager charges their state to it."""
    kind: str
    incarnation: int
    """1 for the first start of a deployment of this name, incremented by each start. Processes of
    lower incarnations must be dead before this one starts."""
    group: GroupId
    ranks: tuple[RankPlacement, ...]
    spec_json: str
    rendezvous: str = ""
    """`host:port` on the node of rank 0 at which the ranks meet; empty: at a file, because all are
    on one machine."""


class StopWorkers(Command, frozen=True, kw_only=True):
    """End all worker processes of the WPG up to this incarnation, inclusive."""

    deployment: DeploymentId
    incarnation: int
    nodes: tuple[NodeId, ...]


class ReleaseState(Command, frozen=True, kw_only=True):
    """Drop all state that the StateManagers of these nodes hold for a deployment."""

    deployment: DeploymentId
    nodes: tuple[NodeId, ...]


class MigrateState(Command, frozen=True, kw_only=True):
    """Copy a complete version from `sources` to the StateManagers of `nodes`, to each the part of
    its own ranks."""

    deployment: DeploymentId
    seq: int
    sources: tuple[str, ...]
    """Addresses of StateManagers that hold the version."""
    nodes: tuple[NodeId, ...]
    ranks: tuple[RankPlacement, ...]
    """Where all ranks will run."""


class PrefetchState(Command, frozen=True, kw_only=True):
    """Prefetch a deployment's state into host memory: it is likely to be loaded soon."""

    deployment: DeploymentId
    seq: int
    nodes: tuple[NodeId, ...]
    next_use_s: float | None = None
    """Expected time until the load; None: unknown."""
    sources: tuple[str, ...] = ()
    """For a version that a trainer published, and that `nodes` pull from these StateManagers."""


class AbortOperation(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Stop a `generate`, or some of its rows, early; they end with the tokens so far.

    It may come before the `Generate`: what it names then draws nothing.
    """

    operation: OperationId
    deployment: DeploymentId
    addresses: tuple[str, ...]
    incarnation: int = 0
    """Incarnation of the workers at `addresses`."""
    rows: tuple[int, ...] | None = None
    """The rows to stop. None: all."""
    token: FencingToken = FencingToken(0)
    """Only the run under this token is stopped, to be continued in another one. 0: every run."""


class DiscardBlobs(Command, frozen=True, kw_only=True):
    """Delete payloads that no recovery and no caller needs."""

    blobs: tuple[BlobRef, ...]


class SetTimer(Command, frozen=True, kw_only=True):
    """Send `TimerFired` at `at` (core clock, seconds). The shell keeps the earliest timer only."""

    at: float


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a StateManager is told when it stores the state of a rank."""

    seq: int
    """The version that is stored."""
    token: int
    """Fencing token of the group lock."""
    keep_seq: int = 0
    """The last complete version, kept until this one is complete; 0: none."""
    previous_seq: int = 0
    """An earlier complete version that is kept while there is free space; 0: none."""
    base_seq: int = 0
    """A still earlier one, kept likewise until `previous_seq` is on NVMe; 0: none."""
    next_use_s: float | None = None
    """Expected time until the state is needed again. None: unknown."""
    successor: str = ""
    """The deployment that is loaded next on these devices, at version `successor_seq`; a part of
    its state is prefetched to free device memory. Empty: unknown."""
    successor_seq: int = 0


class Run(Command, frozen=True, kw_only=False, gc=False, tag_field="kind"):
    """Run an operation on all ranks of a WPG."""

    kind: ClassVar[OperationKind]
    operation: OperationId
    deployment: DeploymentId
    job: JobId
    group: GroupId
    token: FencingToken
    """Fencing token of the group lock."""
    seq: int
    """Version of the WPG's state after this operation: the number of mutations so far, including
    this operation if it is one. A `Load` restores the version of this number; `Offload`, `Snapshot`
    and `Publish` store the state as that version."""
    addresses: tuple[str, ...]
    """Addresses of the workers, by rank."""
    incarnation: int
    """Incarnation of the workers at `addresses`. An address may belong to another worker later,
    which refuses the run."""
    replay: bool
    """True: the operation is repeated to rebuild lost state, and its result is not needed."""

    @property
    def name(self) -> RunName:
        """Tells this run from all others."""
        return self.operation, self.token


class Load(Run, frozen=True, gc=False, tag="load"):
    """Bring the state to the device."""

    kind: ClassVar = OperationKind.LOAD
    previous_seq: int
    """As in `SaveRequest`, like `base_seq`."""
    base_seq: int = 0


class Offload(Run, frozen=True, gc=False, tag="offload"):
    """Store the state and free the device. The fields are explained in `SaveRequest`."""

    kind: ClassVar = OperationKind.OFFLOAD
    keep_seq: int
    previous_seq: int
    next_use_s: float | None = None
    successor: DeploymentId | None = None
    successor_seq: int = 0
    base_seq: int = 0

    @property
    def save(self) -> SaveRequest:
        """The message to each rank's StateManager."""
        return SaveRequest(
            seq=self.seq,
            token=self.token,
            keep_seq=self.keep_seq,
            previous_seq=self.previous_seq,
            base_seq=self.base_seq,
            next_use_s=self.next_use_s,
            successor=self.successor or "",
            successor_seq=self.successor_seq,
        )


class Snapshot(Run, frozen=True, gc=False, tag="snapshot"):
    """Store the state and leave it on the device. The fields are explained in `SaveRequest`."""

    kind: ClassVar = OperationKind.SNAPSHOT
    keep_seq: int
    previous_seq: int
    base_seq: int = 0

    @property
    def save(self) -> SaveRequest:
        """The message to each rank's StateManager."""
        return _kept_on_device(self)


class Publish(Run, frozen=True, gc=False, tag="publish"):
    """Make an immutable version of the parameters that others can pull."""

    kind: ClassVar = OperationKind.PUBLISH


class Sync(Run, frozen=True, gc=False, tag="sync_weights"):
    """Pull the weights that a train deployment published."""

    kind: ClassVar = OperationKind.SYNC_WEIGHTS
    params: SyncWeightsParams | None
    source: DeploymentId
    """The deployment that published; with `source_seq` it identifies the bytes."""
    source_seq: int
    sources: tuple[str, ...]
    """The StateManagers that hold the published version."""
    trainer_step: int
    """Optimizer steps in the pulled weights."""


class Generate(Run, frozen=True, gc=False, tag="generate"):
    """Draw tokens."""

    kind: ClassVar = OperationKind.GENERATE
    params: GenerateParams | None
    payload: BlobRef | None
    partial: BlobRef | None
    """What interrupted runs of the operation drew, which this run continues."""
    trainer_step: int
    """Optimizer steps in the weights."""


class Compute(Run, frozen=True, gc=False):
    """Base of the runs that a model computes on its batch or its gradients."""

    payload: BlobRef | None
    trainer_step: int
    """Optimizer steps in the weights before the run."""


class Forward(Compute, frozen=True, gc=False, tag="forward"):
    """Compute logprobs or scores."""

    kind: ClassVar = OperationKind.FORWARD
    params: ForwardParams | None


class ForwardBackward(Compute, frozen=True, gc=False, tag="forward_backward"):
    """Add the gradients of a loss."""

    kind: ClassVar = OperationKind.FORWARD_BACKWARD
    params: ForwardBackwardParams | None


class OptimStep(Compute, frozen=True, gc=False, tag="optim_step"):
    """Make one step of the optimizer."""

    kind: ClassVar = OperationKind.OPTIM_STEP
    params: AdamParams | None
    stored: SaveRequest | None = None
    """Step the stored state in host memory, and store the result as this version. None: step the
    state on the device."""


class ZeroGrad(Compute, frozen=True, gc=False, tag="zero_grad"):
    """Drop the gradients."""

    kind: ClassVar = OperationKind.ZERO_GRAD
    params: None = None


class LoadCheckpoint(Compute, frozen=True, gc=False, tag="load_checkpoint"):
    """Restore a checkpoint."""

    kind: ClassVar = OperationKind.LOAD_CHECKPOINT
    params: CheckpointParams | None


class SaveCheckpoint(Run, frozen=True, gc=False, tag="save_checkpoint"):
    """Write a checkpoint. The last three fields are explained in `SaveRequest`."""

    kind: ClassVar = OperationKind.SAVE_CHECKPOINT
    params: CheckpointParams | None
    keep_seq: int
    previous_seq: int
    base_seq: int = 0

    @property
    def save(self) -> SaveRequest:
        """The message to each rank's StateManager."""
        return _kept_on_device(self)


def _kept_on_device(run: Snapshot | SaveCheckpoint) -> SaveRequest:
    """The request to store a state that nobody loads soon, because it stays on the device."""
    return SaveRequest(
        seq=run.seq,
        token=run.token,
        keep_seq=run.keep_seq,
        previous_seq=run.previous_seq,
        base_seq=run.base_seq,
    )


class Barrier(Run, frozen=True, gc=False, tag="barrier"):
    """Do nothing."""

    kind: ClassVar = OperationKind.BARRIER


AnyMove = Load | Offload | Snapshot
"""What moves the whole state; the scheduler starts it on its own account."""

AnyCompute = Forward | ForwardBackward | OptimStep | ZeroGrad | LoadCheckpoint
"""What one call of a training or forward backend carries out."""

AnyRun = AnyMove | AnyCompute | Publish | Sync | Generate | SaveCheckpoint | Barrier
"""Every run. The parameters of a run are None only where nothing is computed: in simulations."""

RUNS: tuple[type[Run], ...] = (
    *(Load, Offload, Snapshot, Publish, Sync, Generate, SaveCheckpoint, Barrier),
    *(Forward, ForwardBackward, OptimStep, ZeroGrad, LoadCheckpoint),
)
"""All types in `AnyRun`."""


def read_run(plain: object) -> AnyRun:
    """A run from its plain values.

    Raises:
        msgspec.ValidationError: it is no run, or malformed.
    """
    # For a union msgspec would prepare all its types at each call, which takes 100 µs.
    made: Any = _BY_TAG.get(plain.get("kind")) if isinstance(plain, dict) else None
    if made is None:
        raise msgspec.ValidationError("it is no run of a known kind")
    run: AnyRun = msgspec.convert(plain, made)
    return run


_BY_TAG: dict[object, type[Run]] = {run.kind.value: run for run in RUNS}
