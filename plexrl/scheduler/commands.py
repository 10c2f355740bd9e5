"""What the scheduler core asks its shell to do. Imperative, plain values, safe to repeat.

A shell (live service or simulator) carries each command out and reports what came of it as an
event. After a restart the core issues again whatever is not known to be done, so every receiver
must take a repeated command as a question for the outcome of the first.
"""

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
from plexrl.wire.messages import message
from plexrl.wire.operations import OperationKind


@message
class Command:
    """Base of all commands."""


@message
class RankPlacement:
    """Where one rank of a WPG runs."""

    rank: int
    node: NodeId
    gpu: int
    """Index of the GPU on its node."""


@message
class LaunchWorkers(Command):
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


@message
class StopWorkers(Command):
    """End every worker process of the WPG up to and including this incarnation."""

    deployment: DeploymentId
    incarnation: int
    nodes: tuple[NodeId, ...]


@message
class ReleaseState(Command):
    """Drop everything the StateManagers of these nodes keep for a deployment."""

    deployment: DeploymentId
    nodes: tuple[NodeId, ...]


@message
class MigrateState(Command):
    """Have the StateManagers of `nodes` fetch a complete version from one of `sources`."""

    deployment: DeploymentId
    seq: int
    sources: tuple[str, ...]
    """Addresses of StateManagers that hold it."""
    nodes: tuple[NodeId, ...]


@message
class PrefetchState(Command):
    """A hint: the deployment is likely to be loaded soon; bring its state into host memory."""

    deployment: DeploymentId
    seq: int
    nodes: tuple[NodeId, ...]
    next_use_s: float | None = None
    """Until the load is expected; absent: nothing is known."""


@message
class RunOperation(Command):
    """Run an operation on every rank of a WPG, by way of a router."""

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


@message
class AbortOperation(Command):
    """Stop a running `generate` early; it finishes with what it has."""

    operation: OperationId
    deployment: DeploymentId
    addresses: tuple[str, ...]


@message
class DiscardBlobs(Command):
    """No recovery and no caller needs these any more."""

    blobs: tuple[BlobRef, ...]


@message
class SetTimer(Command):
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
