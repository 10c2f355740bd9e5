"""Retry of runs that met a full or failing disk, full memory, or an unavailable service.

Such a run changed nothing and does not fail: the operation returns to the head of its queue, and is
retried after a back-off. Other members may use the group meanwhile, except during a replay.
`explain` and the cluster's status show the reason. The number of retries has no limit; an
operation's deadline ends them.
"""

from collections.abc import Iterable

from plexrl.errors import (
    DeviceMemoryFullError,
    OverloadedError,
    PlexRLError,
    StorageFullError,
    StorageUnavailableError,
    UnavailableError,
)
from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.accounting.usage import discard
from plexrl.scheduler.operations.held.unreturned_memory import (
    foreign_memory,
    named_holders,
    reason_for,
)
from plexrl.scheduler.operations.submission.queue_order import return_to_queue
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.deployment.wpg.backoff import BACKOFF_S_MAX
from plexrl.scheduler.state.group_lock import fence
from plexrl.scheduler.state.machines.operation_states import OperationTrigger
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.operation import Operation, change_operation
from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.messages.cluster_views import ForeignMemoryView, HeldView

CONDITIONS = (
    *(DeviceMemoryFullError, OverloadedError),
    *(StorageFullError, StorageUnavailableError, UnavailableError),
)
"""Errors of conditions that pass: the same run may succeed later."""


def is_held(error: PlexRLError, *, state_intact: bool) -> bool:
    """Whether a run that ended with `error` is retried."""
    return state_intact and isinstance(error, CONDITIONS)


def hold(
    step: Step,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
) -> None:
    """Retry a run, which is no longer in flight, after a back-off."""
    effects, now = step.effects, step.now
    delay(deployment, error, now)
    effects.wake(deployment.wpg.backoff.until, timers.group_step(deployment.placement.groups[0]))
    effects.touch_all(deployment.placement.groups)
    # The open cycle does not measure the job's demand.
    deployment.demand.cycles.abandon()
    discard(operation)
    if operation.operation not in deployment.work.replay.replaying:
        requeue(step.state, deployment, operation, now)


def delay(
    deployment: Deployment,
    error: PlexRLError,
    now: float,
    longest_s: float = BACKOFF_S_MAX,
) -> None:
    """Report the condition that a run met, and delay the next one, by at most `longest_s`."""
    foreign, named = foreign_memory(deployment, error), named_holders(deployment, error)
    deployment.wpg.backoff.report(error.code, error.message, now, foreign, named)
    deployment.wpg.backoff.retry_later(now, longest_s)


def requeue(state: State, deployment: Deployment, operation: Operation, now: float) -> None:
    """Put a run that changed nothing, or is to be continued, and is no longer in flight, back into
    its queue."""
    change_operation(operation, OperationTrigger.REQUEUED)
    operation.started_at = None
    return_to_queue(state, deployment, operation)
    if not deployment.work.running:
        if deployment.wpg.residency is not Residency.OFFLOADED:
            deployment.demand.burst.pause(now)
        deployment.demand.burst.want(now)


def renew_token(state: State, deployment: Deployment, operation: Operation) -> None:
    """Give the groups a new token before a run is retried under the same grant: workers answer a
    repeated (operation, token) with their first answer."""
    groups = state.groups_of(deployment)
    if operation.token == groups[0].token:
        fence(state, groups)


def held_view(
    state: State, names: Iterable[DeploymentId] | None = None, *, sees_all: bool
) -> list[HeldView]:
    """The deployments among `names`, or among all, that retry runs, with the reason as their tenant
    or an operator, who `sees_all`, may read it."""
    return [
        {
            "deployment": deployment.deployment,
            "code": deployment.wpg.backoff.code,
            "message": reason_for(state, deployment, sees_all=sees_all),
            "since": deployment.wpg.backoff.since,
            "tries": deployment.wpg.backoff.tries,
        }
        for deployment in _held(state, names)
    ]


def foreign_memory_view(
    state: State, names: Iterable[DeploymentId] | None = None
) -> list[ForeignMemoryView]:
    """The foreign memory for which deployments among `names`, or among all, wait, by node, GPU and
    process."""
    found: dict[tuple[NodeId, int, int], ForeignMemoryView] = {}
    for deployment in _held(state, names):
        since = deployment.wpg.backoff.since
        for each in deployment.wpg.backoff.foreign:
            key = each.node, each.gpu, each.pid
            known = found.get(key)
            found[key] = {
                "node": each.node,
                "gpu": each.gpu,
                "pid": each.pid,
                "nbytes": each.nbytes,
                "since": since if known is None else min(since, known["since"]),
            }
    return [found[key] for key in sorted(found)]


def foreign_text(each: ForeignMemoryView) -> str:
    """For people; without the node."""
    return (
        f"process {each['pid']}, which is no worker, holds {each['nbytes']} bytes of GPU "
        f"{each['gpu']}"
    )


def _held(state: State, names: Iterable[DeploymentId] | None) -> list[Deployment]:
    deployments = map(state.deployment, state.deployments if names is None else names)
    return [
        deployment
        for deployment in deployments
        if deployment.wpg.backoff.code
        and (deployment.work.queue or deployment.work.running)
        and deployment.wpg.state is not WpgState.STOPPED
    ]
