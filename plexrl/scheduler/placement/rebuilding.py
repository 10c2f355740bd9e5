"""State that is damaged or lost, computed anew from what was kept.

A WPG's version is made again by the mutations that led to it, repeated from an earlier version,
from the initial weights or from the checkpoint that was loaded last: the same bits, for the
backends are deterministic. A
rollout's weights are what it synced last; where the version it pulled is lost too, its trainer
publishes again, and the rollout then has the trainer's present weights, which may be newer.
"""

from plexrl.errors import PlexRLError
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.operations.operations import enqueue_publish, publish_name
from plexrl.scheduler.operations.replay import payload_bytes
from plexrl.scheduler.placement.placement import shares
from plexrl.scheduler.state import timers
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind

OUT_OF_REACH = frozenset({"state_lost", "connection_lost"})
"""Errors of a sync that another publish mends. A source that does not answer is waited for instead
(`holding`): each try asks the nodes that the trainer is on then."""

LOST_CODES = frozenset({"state_lost", "corrupt_state"})
"""Errors of a load or a copy that say that the version is damaged or missing."""


def rebuild(context: Context, deployment: Deployment, now: float) -> bool:
    """Have the next load begin from the initial weights, where a node that holds the WPG's version
    is lost and what led to it was kept. False: nothing has changed.

    A lost node that may come back is awaited for as long as the repetition would take: whenever it
    comes, at most twice the better choice is lost.
    """
    nodes = context.state.nodes
    lost = [each for each in deployment.state_nodes if not nodes[each].alive]
    if not lost or not deployment.replay.past_is_whole:
        return False
    for name in lost if context.config.lost_nodes_return else ():
        node = nodes[name]
        begins_at = (node.lost_at or 0.0) + _repetition_s(context, deployment)
        if now < begins_at and not node.is_draining:
            context.wake(begins_at, timers.node_check(name))
            return False
    return _begin_anew(deployment)


def _repetition_s(context: Context, deployment: Deployment) -> float:
    """Computing that a rebuild from the initial weights repeats."""
    operations = context.state.operations
    names = [*deployment.replay.past, *deployment.replay.log]
    return sum(operations[name].compute_s or 0.0 for name in names)


def fall_back(context: Context, deployment: Deployment) -> bool:
    """Have the next load begin from the version before the durable one, which is damaged or
    missing, or from the initial weights. False: neither can lead to the present state, and nothing
    has changed."""
    replay = deployment.replay
    if not replay.previous_seq:
        return _begin_anew(deployment)
    operations = context.state.operations
    behind = [name for name in replay.past if operations[name].seq > replay.previous_seq]
    replay.fall_back(len(behind), payload_bytes(context, behind))
    _forget_place(deployment)
    return True


def _begin_anew(deployment: Deployment) -> bool:
    """Have the next load begin from the initial weights, if all that came after is kept."""
    if not deployment.replay.past_is_whole:
        return False
    deployment.replay.begin_again()
    deployment.state_nodes = []
    _forget_place(deployment)
    return True


def _forget_place(deployment: Deployment) -> None:
    """In which tier the version lies is not known."""
    deployment.nvme_bytes = 0
    deployment.nvme_bytes_by_node.clear()


def is_republished(
    context: Context,
    deployment: Deployment,
    operation: Operation,
    error: PlexRLError,
    now: float,
) -> bool:
    """Whether the trainer was asked to publish again for a sync that could not be repeated; it is
    repeated after that. False: another publish would not help."""
    if operation.source is None or error.code not in OUT_OF_REACH:
        return False
    if shares(deployment):
        # It would keep the group while it waits, and the trainer may be another member.
        return False
    if deployment.failures >= context.config.launch_attempts:
        return False
    deployment.failures += 1
    del deployment.running[operation.operation]
    trainer = context.deployment(operation.source)
    name = publish_name(context, operation.operation, str(deployment.failures))
    operation.after = name
    enqueue_publish(context, trainer, name, operation.operation, now)
    return True


def may_replay(context: Context, deployment: Deployment) -> bool:
    """Whether the next operation to repeat has all that it needs."""
    operation = context.state.operations[deployment.replay.replaying[0]]
    if operation.kind != OperationKind.SYNC_WEIGHTS or operation.after is None:
        return True
    publish = context.state.operations.get(operation.after)
    return publish is None or publish.state.is_final
