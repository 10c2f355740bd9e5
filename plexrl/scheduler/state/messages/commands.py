"""Commands of the scheduler core to its shell: imperative, plain values, safe to repeat.

A shell (live service or simulator) executes each command and reports the outcome as an event. After
a restart the core sends all commands again whose outcome is unknown. A receiver answers a repeated
command with the outcome of the first one.
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


class RunOperation(Command, frozen=True, gc=False):
    """Run an operation on all ranks of a WPG, through a router.

    Hot code passes the fields by position: by keyword it takes 1.5 µs instead of 0.3 µs. `gc` is
    off because strings and numbers form no reference cycles.
    """

    operation: OperationId
    deployment: DeploymentId
    job: JobId
    kind: OperationKind
    group: GroupId
    token: FencingToken
    """Fencing token of the group lock."""
    seq: int
    """Version of the WPG's state after this operation: the number of mutations so far, including
    this operation if it is one. `load` restores the version of this number; `offload`, `snapshot`
    and `publish` store the state as that version."""
    replay: bool
    """True: the operation is repeated to rebuild lost state, and its result is not needed."""
    params_json: str
    payload: BlobRef | None
    addresses: tuple[str, ...]
    """Addresses of the workers, by rank."""
    sources: tuple[str, ...] = ()
    """`sync_weights`: the StateManagers that hold the published version."""
    source: DeploymentId | None = None
    """`sync_weights`: the deployment that published; with `source_seq` it identifies the bytes."""
    source_seq: int = 0
    keep_seq: int = 0
    """`offload`, `snapshot`: the last complete version, kept until the new one is complete."""
    next_use_s: float | None = None
    """`offload`: expected time until the WPG needs its state again; None: unknown."""
    previous_seq: int = 0
    """An earlier complete version that is kept while there is free space; 0: none."""
    trainer_step: int = 0
    """Optimizer steps in the weights: of `sync_weights` in the pulled weights, else in the WPG's
    own."""
    incarnation: int = 0
    """Incarnation of the workers at `addresses`. An address may belong to another worker later,
    which refuses the run."""
    partial: BlobRef | None = None
    """`generate`: what its interrupted runs drew, which this run continues."""
    successor: DeploymentId | None = None
    """`offload`: the member that is loaded next, at version `successor_seq`; a part of its state is
    prefetched to free device memory. None: there is none, or it has no stored state."""
    successor_seq: int = 0


class AbortOperation(Command, frozen=True, kw_only=True, omit_defaults=True):
    """Stop a `generate`, or some of its rows, early; they end with the tokens so far.

    It may come before the `RunOperation`: what it names then draws nothing.
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
