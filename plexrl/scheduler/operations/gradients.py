"""How many `forward_backward`s of a deployment have gradients that wait for a step."""

from typing import Final

from plexrl.scheduler.core.context import Context
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind

_FORWARD_BACKWARD: Final = OperationKind.FORWARD_BACKWARD
_DROPS_THEM: Final = frozenset(
    {OperationKind.OPTIM_STEP, OperationKind.ZERO_GRAD, OperationKind.LOAD_CHECKPOINT}
)


def gradients_after(kind: OperationKind, count: int) -> int:
    """How many wait after an operation, where `count` did before it."""
    if kind == _FORWARD_BACKWARD:
        return count + 1
    return 0 if kind in _DROPS_THEM else count


def gradients_to_come(context: Context, deployment: Deployment) -> int:
    """How many will wait once everything that was accepted is done."""
    count = deployment.waiting_gradients
    for name in (*deployment.running, *deployment.queue):
        operation = context.state.operations[name]
        # One that is being replayed is counted.
        if not operation.state.is_final:
            count = gradients_after(operation.kind, count)
    return count
