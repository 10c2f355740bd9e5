"""Retry of runs that met a full disk, memory or queue, or an unavailable service.

Such a run changed nothing and does not fail: the operation returns to the head of its queue, and is
retried after a back-off. Other members may use the group meanwhile, except during a replay.
`explain` and the cluster's status show the reason. The number of retries has no limit; an
operation's deadline ends them.
"""

from collections.abc import Iterable
from typing import TypedDict

from plexrl.errors import (
    DeviceMemoryFullError,
    OverloadedError,
    PlexRLError,
    StorageFullError,
    UnavailableError,
)
from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.context.effects import Effects
from plexrl.scheduler.state.group_lock import fence
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, Group, State

CONDITIONS = (DeviceMemoryFullError, OverloadedError, StorageFullError, UnavailableError)
"""Errors of conditions that pass: the same run may succeed later."""


class HeldView(TypedDict):
    """A deployment that retries runs."""

    deployment: DeploymentId
    code: str
    """Code of the condition's error."""
    message: str
    since: float
    """When the first of these runs met one, in seconds on the scheduler's clock."""
    tries: int
    """Runs in a row that met a condition."""


def is_held(error: PlexRLError, *, state_intact: bool) -> bool:
    """Whether a run that ended with `error` is retried."""
    return state_intact and isinstance(error, CONDITIONS)


def hold(
    state: State,
    effects: Effects,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
    now: float,
) -> None:
    """Retry a run, which is no longer in flight, after a back-off."""
    deployment.backoff.report(error.code, error.message, now)
    deployment.backoff.retry_later(now)
    assert deployment.group is not None, f"{operation.operation} ran without a group"
    effects.wake(deployment.backoff.until, timers.group_step(deployment.group))
    effects.touch(deployment.group)
    # The open cycle does not measure the job's demand.
    deployment.cycles.abandon()
    if operation.operation not in deployment.replay.replaying:
        requeue(state, deployment, operation, now)


def requeue(state: State, deployment: Deployment, operation: Operation, now: float) -> None:
    """Put a run that changed nothing, or is to be continued, and is no longer in flight, back into
    its queue."""
    change_operation(operation, OperationTrigger.REQUEUED)
    operation.started_at = None
    # Discarded work is not billed.
    operation.gpu_seconds = operation.kept_gpu_seconds
    deployment.queue.insert(_place(state, deployment.queue, operation), operation.operation)
    if not deployment.running:
        deployment.burst.pause(now)
        deployment.burst.want(now)


def renew_token(state: State, group: Group, operation: Operation) -> None:
    """Give the group a new token before a run is retried under the same grant: workers answer a
    repeated (operation, token) with their first answer."""
    if operation.token == group.token:
        fence(state, group)


def held_view(state: State, names: Iterable[DeploymentId]) -> list[HeldView]:
    """The deployments among `names` that retry runs, with the reason."""
    found: list[HeldView] = []
    for name in names:
        deployment = state.deployment(name)
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


def _place(state: State, queue: list[OperationId], operation: Operation) -> int:
    """Queue position of a returning operation: after all that were submitted before it."""
    operations = state.operations
    place = 0
    while place < len(queue) and operations[queue[place]].submitted_at < operation.submitted_at:
        place += 1
    return place
