"""Recomputes damaged or lost state by replaying the operations that were kept.

The mutations that led to a version are repeated from an earlier version, from the initial weights
or from the checkpoint loaded last. The backends are deterministic, so the result is bit-identical.
The weights of a rollout are those of its last sync. If the version it pulled is lost too, its
trainer publishes again; the rollout then has the present weights of the trainer, which may be
newer.
"""

from plexrl.errors import PlexRLError
from plexrl.scheduler.accounting.usage import discard
from plexrl.scheduler.operations.held.holding import requeue
from plexrl.scheduler.operations.operations import enqueue_publish, publish_name
from plexrl.scheduler.operations.replay import after_previous, payload_bytes
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.operations import OperationKind

OUT_OF_REACH = frozenset({"state_lost", "connection_lost"})
"""Errors of a sync that another publish repairs. If a source does not answer, the sync is retried
instead (`holding`) with the nodes that the trainer is on at that time."""

LOST_CODES = frozenset({"state_lost", "corrupt_state"})
"""Errors of a load or copy that mean that the version is damaged or missing."""


def rebuild(step: Step, deployment: Deployment) -> bool:
    """Make the next load start from the initial weights, if a node with the WPG's version is lost
    and all operations since are kept. False: nothing has changed.

    A lost node that may come back is awaited for as long as the replay would take, so the delay is
    at most twice that of the better choice.
    """
    state = step.state
    nodes = state.nodes
    lost = [node for node in deployment.wpg.stored.nodes if not nodes[node].alive]
    if not lost or not deployment.work.replay.past_is_whole:
        return False
    for name in lost if step.settings.config.lost_nodes_return else ():
        node = nodes[name]
        begins_at = (node.lost_at or 0.0) + _replay_s(state, deployment)
        if step.now < begins_at and not node.is_draining:
            step.effects.wake(begins_at, timers.node_check(name))
            return False
    return _restart_from_initial(deployment)


def _replay_s(state: State, deployment: Deployment) -> float:
    """Compute time of a replay from the initial weights."""
    operations = state.operations
    names = [*deployment.work.replay.past, *deployment.work.replay.log]
    return sum(operations[name].compute_s or 0.0 for name in names)


def fall_back(state: State, deployment: Deployment) -> bool:
    """Make the next load start from the version before the damaged or missing durable one, or from
    the initial weights. False: neither leads to the present state; nothing has changed."""
    replay = deployment.work.replay
    if not replay.previous_seq:
        return _restart_from_initial(deployment)
    behind = after_previous(state, deployment)
    replay.fall_back(len(behind), payload_bytes(state, behind))
    deployment.wpg.stored.forget_tier()
    return True


def _restart_from_initial(deployment: Deployment) -> bool:
    """Make the next load start from the initial weights, if all operations since are kept."""
    if not deployment.work.replay.past_is_whole:
        return False
    deployment.work.replay.begin_again()
    deployment.wpg.stored.lose()
    return True


def publish_again(
    step: Step, deployment: Deployment, operation: Operation, error: PlexRLError
) -> bool:
    """Repeat a sync after another publish: the version that it was to pull is gone, for example by
    a power cut of the trainer's node. The trainer publishes before anything else that it has to do,
    so these are the same weights unless it has gone on meanwhile. False: another publish would not
    help; nothing has changed."""
    state = step.state
    replays = operation.operation in deployment.work.replay.replaying
    if operation.source is None or error.code not in OUT_OF_REACH:
        return False
    if replays and deployment.spec.shares:
        # It would hold the group while it waits, and the trainer may be another member.
        return False
    if operation.publishes >= step.settings.config.launch_attempts:
        return False
    attempt = "" if operation.after is None else str(operation.publishes + 1)
    operation.publishes += 1
    trainer = state.deployment(operation.source)
    operation.after = publish_name(state, operation.operation, attempt)
    enqueue_publish(step, trainer, operation.after, operation.operation, at_once=True)
    deployment.work.end_run(operation.operation)
    discard(operation)
    if not replays:
        requeue(state, deployment, operation, step.now)
    step.effects.touch_all(deployment.placement.groups)
    return True


def may_replay(state: State, deployment: Deployment) -> bool:
    """Whether the inputs of the next operation to replay are available."""
    operation = state.operations[deployment.work.replay.replaying[0]]
    if operation.kind != OperationKind.SYNC_WEIGHTS or operation.after is None:
        return True
    publish = state.operations.get(operation.after)
    return publish is None or publish.state.is_final
