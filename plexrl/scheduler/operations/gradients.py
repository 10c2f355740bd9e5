"""Counts the batches whose gradients wait for a step."""

from typing import Final

from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.operations import OperationKind

_FORWARD_BACKWARD: Final = OperationKind.FORWARD_BACKWARD
_DROPS_THEM: Final = frozenset(
    {OperationKind.OPTIM_STEP, OperationKind.ZERO_GRAD, OperationKind.LOAD_CHECKPOINT}
)


def gradients_after(kind: OperationKind, count: int) -> int:
    """The count after an operation, if it was `count` before."""
    if kind == _FORWARD_BACKWARD:
        return count + 1
    return 0 if kind in _DROPS_THEM else count


def gradients_to_come(state: State, deployment: Deployment) -> int:
    """The count after all accepted operations."""
    count = deployment.work.waiting_gradients
    for name in (*deployment.work.running, *deployment.work.queue):
        operation = state.operations[name]
        # An operation that is replayed was counted before.
        if not operation.state.is_final:
            count = gradients_after(operation.kind, count)
    return count
