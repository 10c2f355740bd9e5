"""What the scheduler core asks its shell to do. Imperative, plain values, safe to repeat.

A shell (live service or simulator) carries each command out and reports what came of it as an
event. After a restart the core issues again whatever is not known to be done, so every receiver
must take a repeated command as a question for the outcome of the first.
"""

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
from plexrl.wire.codec import Codec
from plexrl.wire.operations import OperationKind


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all commands."""


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
    """Whose it is: the workers' StateManager charges their state to it."""
    kind: str
    incarnation: int
    """1 for the first start of a deployment of this name, and more with each; a process of a lower
    incarnation must be dead before this one starts."""
    group: GroupId
    ranks: tuple[RankPlacement, ...]
    spec_json: str


class StopWorkers(Command, frozen=True, kw_only=True):
    """End every worker process of the WPG up to and including this incarnation."""

    deployment: DeploymentId
    incarnation: int
    nodes: tuple[NodeId, ...]


class ReleaseState(Command, frozen=True, kw_only=True):
    """Drop everything the StateManagers of these nodes keep for a deployment."""

    deployment: DeploymentId
    nodes: tuple[NodeId, ...]


class MigrateState(Command, frozen=True, kw_only=True):
    """Have the StateManagers of `nodes` fetch a complete version from one of `sources`."""

    deployment: DeploymentId
    seq: int
    sources: tuple[str, ...]
    """Addresses of StateManagers that hold it."""
    nodes: tuple[NodeId, ...]


class PrefetchState(Command, frozen=True, kw_only=True):
    """A hint: the deployment is likely to be loaded soon; bring its state into host memory."""

    deployment: DeploymentId
    seq: int
    nodes: tuple[NodeId, ...]
    next_use_s: float | None = None
    """Until the load is expected; absent: nothing is known."""


class RunOperation(Command, frozen=True, gc=False):
    """Run an operation on every rank of a WPG, by way of a router.

    Where every event makes one its fields are given in their order: by name it takes five times as
    long (1.5 µs, not 0.3). What holds only strings and numbers is in no cycle of references, so
    `gc` need not look for one.
    """

    operation: OperationId
    deployment: DeploymentId
    job: JobId
    kind: OperationKind
    group: GroupId
    token: FencingToken
    """Of the group lock that admits this run."""
    seq: int
    """Version of the WPG's state after this operation: for a mutating one its own place in the
    WPG's order of mutations, else the count of mutations before it. `load` restores, `offload`,
    `snapshot` and `publish` label the version of this number."""
    replay: bool
    """True: completed before and repeated to rebuild lost state; nobody waits for its result."""
    params_json: str
    payload: BlobRef | None
    addresses: tuple[str, ...]
    """Of the workers, by rank."""
    sources: tuple[str, ...] = ()
    """`sync_weights`: the StateManagers that hold the published version."""
    source: DeploymentId | None = None
    """`sync_weights`: whose version; with `source_seq` it names the bytes."""
    source_seq: int = 0
    keep_seq: int = 0
    """`offload`, `snapshot`: the last complete version; keep it until the new one is whole."""
    next_use_s: float | None = None
    """`offload`: until the WPG is expected to need its state again; absent: nothing is known."""
    previous_seq: int = 0
    """An earlier complete version that is kept while there is room for it; 0: none."""
    trainer_step: int = 0
    """Optimizer steps in the weights: `sync_weights`, in those that are pulled; else in those that
    the WPG has."""


class AbortOperation(Command, frozen=True, kw_only=True):
    """Stop a running `generate` early; it finishes with what it has."""

    operation: OperationId
    deployment: DeploymentId
    addresses: tuple[str, ...]


class DiscardBlobs(Command, frozen=True, kw_only=True):
    """No recovery and no caller needs these any more."""

    blobs: tuple[BlobRef, ...]


class SetTimer(Command, frozen=True, kw_only=True):
    """Send `TimerFired` at `at` (the core's clock, s). The earliest pending one suffices."""

    at: float


CODEC: Codec[Command] = Codec(
    LaunchWorkers,
    StopWorkers,
    ReleaseState,
    MigrateState,
    PrefetchState,
    RunOperation,
    AbortOperation,
    DiscardBlobs,
    SetTimer,
)
