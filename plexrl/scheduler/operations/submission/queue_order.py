"""The order of a deployment's queue: that of submission, also of operations that return to it.

So places are found by bisection.
"""

from bisect import bisect_left

from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State


def place_in_queue(state: State, deployment: Deployment, operation: Operation) -> int:
    """Queue index at which an operation returns: after all that were submitted before it."""
    return bisect_left(
        deployment.queue,
        operation.submitted_at,
        key=lambda name: state.operations[name].submitted_at,
    )


def position_in_queue(state: State, deployment: Deployment, operation: Operation) -> int:
    """Queue index of a queued operation; the time is as for `place_in_queue`, and linear in the
    operations that were submitted at the same instant."""
    return deployment.queue.index(operation.operation, place_in_queue(state, deployment, operation))
