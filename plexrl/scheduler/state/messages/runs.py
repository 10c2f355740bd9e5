"""Makes the message that starts a run, from the records of its operation."""

from typing import Any, Final

from msgspec.structs import replace

from plexrl.scheduler.state.deployment.replay_log import ReplayLog
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, Group
from plexrl.wire.messages import (
    AnyMove,
    AnyRun,
    Barrier,
    Forward,
    ForwardBackward,
    Generate,
    Load,
    LoadCheckpoint,
    Offload,
    OptimStep,
    Publish,
    SaveCheckpoint,
    SaveRequest,
    Snapshot,
    Sync,
    ZeroGrad,
)
from plexrl.wire.operations import OperationKind

_GENERATE: Final = OperationKind.GENERATE
_SYNC_WEIGHTS: Final = OperationKind.SYNC_WEIGHTS
_SAVE_CHECKPOINT: Final = OperationKind.SAVE_CHECKPOINT
_LOAD: Final = OperationKind.LOAD
_OFFLOAD: Final = OperationKind.OFFLOAD
_OFFLOADED: Final = Residency.OFFLOADED

_COMPUTES: Final[dict[OperationKind, Any]] = {
    OperationKind.FORWARD: Forward,
    OperationKind.FORWARD_BACKWARD: ForwardBackward,
    OperationKind.OPTIM_STEP: OptimStep,
    OperationKind.ZERO_GRAD: ZeroGrad,
    OperationKind.LOAD_CHECKPOINT: LoadCheckpoint,
}
"""Their parameters were checked against the kind when the operation was submitted."""


def make_run(
    group: Group,
    deployment: Deployment,
    operation: Operation,
    sources: tuple[str, ...],
    *,
    replay: bool,
) -> AnyRun:
    """The run of an operation that is no move, under the group's token. `sources`: for a sync, the
    StateManagers to pull from. A step of an offloaded deployment is one of its stored version."""
    kind = operation.kind
    head = (
        operation.operation,
        deployment.deployment,
        deployment.job,
        group.group,
        group.token,
        operation.seq,
        deployment.wpg.processes.endpoints,
        deployment.wpg.processes.incarnation,
        replay,
    )
    compute = _COMPUTES.get(kind)
    params: Any = operation.params
    if compute is not None:
        run: AnyRun = compute(*head, operation.payload, deployment.work.trainer_step, params)
        if deployment.wpg.residency is _OFFLOADED and isinstance(run, OptimStep):
            return _stored_step(run, deployment.work.replay)
        return run
    if kind is _GENERATE:
        partial, step = operation.partial, deployment.work.trainer_step
        return Generate(*head, params, operation.payload, partial, step)
    if kind is _SYNC_WEIGHTS:
        source = operation.source
        assert source is not None, f"{operation.operation} pulls from nobody"
        return Sync(*head, params, source, operation.source_seq, sources, operation.source_step)
    if kind is _SAVE_CHECKPOINT:
        log = deployment.work.replay
        return SaveCheckpoint(*head, params, log.durable_seq, log.previous_seq, log.base_seq)
    return Barrier(*head) if kind is OperationKind.BARRIER else Publish(*head)


def _stored_step(run: OptimStep, log: ReplayLog) -> OptimStep:
    """The step of an offloaded deployment: it makes a version of the stored one."""
    order = SaveRequest(
        seq=run.seq,
        token=run.token,
        keep_seq=log.durable_seq,
        previous_seq=log.previous_seq,
        base_seq=log.base_seq,
    )
    return replace(run, stored=order)


def make_move(
    group: Group,
    deployment: Deployment,
    operation: Operation,
    next_use_s: float | None,
    incoming: Deployment | None,
) -> AnyMove:
    """The run of a load, offload or snapshot, under the group's token. For an offload:
    `next_use_s`, the expected time until the next load, and `incoming`, what is loaded instead."""
    log = deployment.work.replay
    head = (
        operation.operation,
        deployment.deployment,
        deployment.job,
        group.group,
        group.token,
        operation.seq,
        deployment.wpg.processes.endpoints,
        deployment.wpg.processes.incarnation,
        False,
    )
    # The former version becomes the earlier one, unless the limits allow an older one.
    previous_seq, base_seq = log.previous_seq, log.base_seq
    if operation.kind is _LOAD:
        return Load(*head, previous_seq, base_seq)
    if operation.kind is not _OFFLOAD:
        return Snapshot(*head, log.durable_seq, previous_seq, base_seq)
    successor = None if incoming is None else incoming.deployment
    successor_seq = 0 if incoming is None else incoming.work.replay.durable_seq
    to_keep = log.durable_seq, previous_seq
    return Offload(*head, *to_keep, next_use_s, successor, successor_seq, base_seq)
