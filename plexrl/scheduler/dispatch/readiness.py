"""Whether a deployment has an operation that could run now, if it had its group."""

from typing import Final

from plexrl.ids import OperationId
from plexrl.scheduler.placement.relocation import is_stopping
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.operations import OperationState

_READY: Final = WpgState.READY
_FINISHED: Final = OperationState.FINISHED


def next_operation(state: State, deployment: Deployment) -> Operation | None:
    """The head of the queue, if only the load of its WPG is missing to run it."""
    if not deployment.queue:
        return None
    head = state.operations[deployment.queue[0]]
    return head if head.after is None or _is_over(state, head.after) else None


def _is_over(state: State, name: OperationId) -> bool:
    dependency = state.operations.get(name)
    return dependency is None or dependency.state is _FINISHED


def wants_the_group(state: State, deployment: Deployment, now: float) -> bool:
    """Whether the deployment has an operation to run, ready processes, and no back-off."""
    queue = deployment.queue
    if not queue or deployment.state is not _READY or now < deployment.backoff.until:
        return False
    if deployment.moves.planned is not None and is_stopping(state, deployment):
        return False
    after = state.operations[queue[0]].after
    return after is None or _is_over(state, after)
