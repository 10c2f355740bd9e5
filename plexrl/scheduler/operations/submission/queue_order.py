"""The order of a deployment's queue: that of submission, also of operations that return to it.

So places are found by bisection.
"""

from bisect import bisect_left

from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State


def return_to_queue(state: State, deployment: Deployment, operation: Operation) -> None:
    """Put an operation back into its queue, after all that were submitted before it."""
    place = _place(state, deployment, operation)
    deployment.work.enqueue(place, operation.operation)


def position_in_queue(state: State, deployment: Deployment, operation: Operation) -> int:
    """Queue index of a queued operation, in time linear in the operations that were submitted at
    the same instant."""
    return deployment.work.queue.index(operation.operation, _place(state, deployment, operation))


def _place(state: State, deployment: Deployment, operation: Operation) -> int:
    return bisect_left(
        deployment.work.queue,
        operation.submitted_at,
        key=lambda name: state.operations[name].submitted_at,
    )
