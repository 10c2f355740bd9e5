"""Handles nodes that join, return, drain or are lost, and the workers on them."""

from plexrl.errors import ConflictError, NotFoundError
from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.jobs.lifecycle import end_job, launch, restart, send_launch, worker_ready
from plexrl.scheduler.placement.cluster import Cluster, Context
from plexrl.scheduler.recovery.evacuation import placed_on, reconcile_node, replace_shrunk
from plexrl.scheduler.recovery.rebuilding import LOST_CODES, fall_back
from plexrl.scheduler.recovery.relocation import migrated, send_migration, settle
from plexrl.scheduler.rules.settings import Step
from plexrl.scheduler.state.machines.job_states import JobTrigger
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages import timers
from plexrl.scheduler.state.messages.events import (
    NodeDrainChanged,
    NodeJoined,
    NodeLost,
    NodeRemoved,
    StateMigrated,
)
from plexrl.scheduler.state.records import Deployment, Node
from plexrl.wire.messages import ReleaseState, StopWorkers

MIGRATION_RETRY_S = 2.0
"""Delay before a failed copy is tried again."""


def node_joined(context: Context, event: NodeJoined, now: float) -> None:
    """A node joined or returned, with these workers and states."""
    state, effects = context.state, context.effects
    node = state.nodes[event.node] = _node_of(event, state.nodes.get(event.node))
    context.cluster.capacity.inventory.node_changed(node)
    replace_shrunk(context, event.node, now)
    wanted = set()
    for deployment in placed_on(context.cluster.capacity, event.node):
        if deployment.wpg.state == WpgState.MIGRATING:
            send_migration(context.step(now), deployment)
        else:
            wanted.update(_take_over_workers(context, event, deployment, now))
    for worker in event.workers:
        if (worker.deployment, worker.rank) not in wanted:
            effects.emit(
                StopWorkers(
                    deployment=worker.deployment,
                    incarnation=worker.incarnation,
                    nodes=(event.node,),
                )
            )
    live = state.deployments
    for name in event.states:
        if name not in live or not _keeps_state(live[name], event.node):
            effects.emit(ReleaseState(deployment=name, nodes=(event.node,)))
    context.cluster.queues.waiting.retry_all()
    unsettled = context.cluster.capacity.inventory.unsettled
    if unsettled:
        # WPGs that leave other nodes may have waited for the state on this one.
        for other in [name for name in state.nodes if name in unsettled]:
            reconcile_node(context, other, now)


def _node_of(event: NodeJoined, known: Node | None) -> Node:
    """The node as its agent describes it; of a known one, what only the scheduler knows is kept."""
    return Node(
        node=event.node,
        gpus=event.gpus,
        gpu_memory_bytes=event.gpu_memory_bytes,
        host_memory_bytes=event.host_memory_bytes,
        statemanager=event.statemanager,
        node_type=event.node_type,
        block=event.block,
        nvme_bytes=event.nvme_bytes,
        is_draining=known is not None and known.is_draining,
        host=event.host,
        ports=event.ports,
        fabric=event.fabric,
        machine=event.machine,
        gpu_kind=event.gpu_kind,
        speed=event.speed,
        last_port=0 if known is None else known.last_port,
    )


def _take_over_workers(
    context: Context, event: NodeJoined, deployment: Deployment, now: float
) -> list[tuple[DeploymentId, int]]:
    """The workers (deployment, rank) of the node that the deployment goes on with. If some are
    missing, it is launched, or restarted if it had been ready."""
    processes = deployment.wpg.processes
    incarnation = processes.incarnation if processes.launch_at is None else None
    seen = {
        worker.rank: worker
        for worker in event.workers
        if worker.deployment == deployment.deployment
    }
    taken, missing = list[tuple[DeploymentId, int]](), False
    for place in deployment.placement.ranks:
        if place.node != event.node:
            continue
        worker = seen.get(place.rank)
        if worker is None or worker.incarnation != incarnation:
            missing = True
        else:
            taken.append((deployment.deployment, place.rank))
            worker_ready(context.effects, deployment, place.rank, worker.address, now)
    if missing and deployment.wpg.is_ready:
        _restart_without_workers(context, event, deployment, now)
    elif missing or not deployment.wpg.is_ready:
        send_launch(context.step(now), deployment)
    return taken


def _restart_without_workers(
    context: Context, event: NodeJoined, deployment: Deployment, now: float
) -> None:
    # An idle WPG cannot have caused the loss, so it does not count as a failure. Neither can one
    # on a node that was cut off.
    was_at_work = bool(deployment.work.running) or deployment.wpg.moving is not None
    why = f"node {event.node!r} came back without its workers"
    if event.was_fenced:
        why = f"node {event.node!r} was cut off, and its lease ran out"
    counts = was_at_work and not event.was_fenced
    restart(context, deployment, why, now, counts=counts)


def node_drain_changed(context: Context, event: NodeDrainChanged, now: float) -> None:
    """An operator starts or ends a drain of the node. A drained node gets no new groups, and its
    WPGs move away between two operations as soon as there is capacity elsewhere.

    Raises:
        NotFoundError: there is no such node.
    """
    cluster = context.cluster
    node = context.state.nodes.get(event.node)
    if node is None:
        raise NotFoundError(f"there is no node {event.node!r}")
    node.is_draining = event.is_draining
    cluster.capacity.inventory.node_changed(node)
    # GPUs are available again, or deployments that waited for them block others no longer.
    cluster.queues.waiting.retry_all()
    if event.is_draining:
        reconcile_node(context, event.node, now)
        return
    for deployment in cluster.queues.relocating_in_order():
        if event.node in deployment.placement.nodes:
            deployment.wpg.moves.cancel()
            cluster.queues.end_move(deployment)
            context.effects.touch_all(deployment.placement.groups)


def node_removed(cluster: Cluster, event: NodeRemoved, now: float) -> None:
    """Forget a node that has no work. If its agent connects again, it is a new node.

    Raises:
        ConflictError: the node is in use, or has the state of a deployment.
        NotFoundError: there is no such node.
    """
    del now
    state = cluster.state
    node = state.nodes.get(event.node)
    if node is None:
        raise NotFoundError(f"there is no node {event.node!r}")
    if node.alive and not node.is_draining:
        raise ConflictError(f"node {event.node!r} is in use: drain it first, or end its agent")
    kept = [
        name
        for name, deployment in state.deployments.items()
        if _keeps_state(deployment, event.node)
    ]
    if kept or cluster.capacity.inventory.groups_on(event.node):
        named = ", ".join(repr(name) for name in kept[:3]) or "a group"
        raise ConflictError(
            f"node {event.node!r} still has state or GPUs of {named}: drain it and wait, or cancel "
            "these jobs"
        )
    del state.nodes[event.node]
    cluster.capacity.inventory.node_removed(event.node)
    cluster.queues.waiting.retry_all()


def state_migrated(context: Context, event: StateMigrated, now: float) -> None:
    """A node has fetched a version, or failed to."""
    effects = context.effects
    deployment = context.state.deployments.get(event.deployment)
    if deployment is None or deployment.wpg.state != WpgState.MIGRATING:
        return
    if event.seq != deployment.work.replay.durable_seq:
        return
    if event.code in LOST_CODES:
        reason = _copy_another(context.step(now), deployment, event)
        if reason is not None:
            job = context.state.job(deployment.job)
            end_job(context, job, JobTrigger.FAILED, reason, now)
    elif event.error:
        deployment.wpg.backoff.explain(event.error)
        effects.wake(now + MIGRATION_RETRY_S, timers.migration(event.deployment))
    elif migrated(context.step(now), deployment, event.node):
        launch(context.step(now), deployment)
        effects.touch_all(deployment.placement.groups)


def _copy_another(step: Step, deployment: Deployment, event: StateMigrated) -> str | None:
    """Fall back to another version, because the one to copy is damaged or missing. Returns why the
    job must end, if there is none."""
    state = step.state
    if not fall_back(state, deployment):
        return (
            f"the state of {deployment.deployment!r} cannot be copied to {event.node!r}, nor "
            f"recomputed from the operations that were kept: {event.error}"
        )
    settle(step, deployment)
    if deployment.wpg.state != WpgState.MIGRATING:
        launch(step, deployment)
    return None


def _keeps_state(deployment: Deployment, node: NodeId) -> bool:
    """Whether the node's StateManager has a reason to hold state of the deployment."""
    if deployment.wpg.state == WpgState.STOPPED:
        return False
    return node in deployment.wpg.stored.nodes or node in deployment.placement.nodes


def node_lost(context: Context, event: NodeLost, now: float) -> None:
    """A node and all its workers are gone."""
    node = context.state.nodes.get(event.node)
    if node is None:
        return
    node.alive = False
    if node.lost_at is None:
        node.lost_at = now
    context.effects.wake(
        node.lost_at + context.settings.config.node_replace_s, timers.node_check(event.node)
    )
    context.cluster.capacity.inventory.node_changed(node)
    # Deployments that waited for its GPUs block others no longer.
    context.cluster.queues.waiting.retry_all()
    for deployment in placed_on(context.cluster.capacity, event.node):
        here = [rank.rank for rank in deployment.placement.ranks if rank.node == event.node]
        if deployment.wpg.state == WpgState.MIGRATING:
            continue
        if deployment.wpg.state == WpgState.RECOVERING:
            # It is launched again when the node is back; its ready workers there are dead.
            for rank in here:
                deployment.wpg.processes.lose(rank)
        else:
            restart(context, deployment, f"node {event.node!r} was lost", now)
    reconcile_node(context, event.node, now)
