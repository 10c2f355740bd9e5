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
    NodeId,
    OperationId,
    TenantId,
)


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
