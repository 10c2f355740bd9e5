"""Operations that met a full disk, memory or queue, or a silent part, and changed nothing.

Such an operation is not failed: it goes back to the head of its queue and is tried again after a
back-off. Others may have the group meanwhile, except while a recovery replays operations. `explain`
and the status of the cluster tell the reason. Nothing bounds the number of tries; an
operation's own deadline ends them.
"""

from collections.abc import Iterable
from typing import Any

from plexrl.errors import (
    DeviceMemoryFullError,
    OverloadedError,
    PlexRLError,
    StorageFullError,
    UnavailableError,
)
from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.state import timers
from plexrl.scheduler.state.group_lock import fence
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, Group

CONDITIONS = (DeviceMemoryFullError, OverloadedError, StorageFullError, UnavailableError)
"""Errors that say that the same run succeeds later."""


def is_held(error: PlexRLError, *, state_intact: bool) -> bool:
    """Whether a run that ended with `error` is to be tried again."""
    return state_intact and isinstance(error, CONDITIONS)


def hold(
    context: Context, deployment: Deployment, operation: Operation, error: PlexRLError, now: float
) -> None:
    """Have a run, which is no longer in flight, tried again after a back-off."""
    deployment.backoff.report(error.code, error.message, now)
    deployment.backoff.retry_later(now)
    assert deployment.group is not None, f"{operation.operation} ran without a group"
    context.wake(deployment.backoff.until, timers.group_step(deployment.group))
    context.touch(deployment.group)
    # The cycle at hand is no measure of the job's demand.
    deployment.cycles.abandon()
    if operation.operation in deployment.replay.replaying:
        return
    change_operation(operation, OperationTrigger.REQUEUED)
    operation.started_at = None
    # What came to nothing is nobody's use.
    operation.gpu_seconds = 0.0
    deployment.queue.insert(_place(context, deployment.queue, operation), operation.operation)
    if not deployment.running:
        deployment.burst.pause(now)
        deployment.burst.want(now)


def renew_token(context: Context, group: Group, operation: Operation) -> None:
    """Before a run that was held is sent again under the same grant: workers answer a run that they
    know by its name, which is operation and token, with the answer they gave."""
    if operation.token == group.token:
        fence(context.state, group)


def held_view(context: Context, names: Iterable[DeploymentId]) -> list[dict[str, Any]]:
    """Those of some deployments that are held, with the reason."""
    found = []
    for name in names:
        deployment = context.deployment(name)
        wants = deployment.queue or deployment.running
        if deployment.backoff.code and wants and deployment.state is not WpgState.STOPPED:
            found.append(
                {
                    "deployment": name,
                    "code": deployment.backoff.code,
                    "message": deployment.backoff.reason,
                    "since": deployment.backoff.since,
                    "tries": deployment.backoff.tries,
                }
            )
    return found


def _place(context: Context, queue: list[OperationId], operation: Operation) -> int:
    """Of an operation in a queue that it had left: behind only what was submitted before it."""
    operations = context.state.operations
    place = 0
    while place < len(queue) and operations[queue[place]].submitted_at < operation.submitted_at:
        place += 1
    return place
