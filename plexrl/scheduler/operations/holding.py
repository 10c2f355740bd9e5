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
from plexrl.scheduler.state.group_lock import fence
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, Group

HOLD_S_MIN = 1.0
HOLD_S_MAX = 15.0
"""Back-off before the first try after a refusal, doubled with each one that follows, and its bound:
a disk that has room again is noticed soon."""

CONDITIONS = (DeviceMemoryFullError, OverloadedError, StorageFullError, UnavailableError)
"""Errors that say that the same run succeeds later."""


def is_held(error: PlexRLError, *, state_intact: bool) -> bool:
    """Whether a run that ended with `error` is to be tried again."""
    return state_intact and isinstance(error, CONDITIONS)


def hold(
    context: Context, deployment: Deployment, operation: Operation, error: PlexRLError, now: float
) -> None:
    """Have a run, which is no longer in flight, tried again after a back-off."""
    note_condition(deployment, error.code, error.message, now)
    wait_s = min(HOLD_S_MIN * 2.0 ** min(deployment.held_count, 16), HOLD_S_MAX)
    deployment.held_count += 1
    deployment.held_back_until = now + wait_s
    context.wake(deployment.held_back_until, f"group:{deployment.group}")
    context.touch(deployment.group)
    # The cycle at hand is no measure of the job's demand.
    deployment.cycle = None
    if operation.operation in deployment.replaying:
        return
    change_operation(operation, OperationTrigger.REQUEUED)
    operation.started_at = None
    # What came to nothing is nobody's use.
    operation.gpu_seconds = 0.0
    deployment.queue.insert(_place(context, deployment.queue, operation), operation.operation)
    if not deployment.running:
        deployment.idle_since = deployment.wants_since = now


def note_condition(deployment: Deployment, code: str, message: str, now: float) -> None:
    """Have operators told what keeps the deployment's work from going on."""
    if not deployment.held_code:
        deployment.held_since = now
    deployment.held_code = code
    deployment.held_back_reason = message


def hold_over(deployment: Deployment) -> None:
    """A run of the deployment met no such condition, or nothing is left to be tried again."""
    if not deployment.held_code:
        return
    deployment.held_code = ""
    deployment.held_count = 0
    deployment.held_since = 0.0
    deployment.held_back_until = 0.0


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
        if deployment.held_code and wants and deployment.state is not WpgState.STOPPED:
            found.append(
                {
                    "deployment": name,
                    "code": deployment.held_code,
                    "message": deployment.held_back_reason,
                    "since": deployment.held_since,
                    "tries": deployment.held_count,
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
