"""Moves WPGs off nodes that are lost, drained, or came back with fewer GPUs.

A WPG can move if its state survives. Without a durable version the replay log rebuilds the state. A
durable version can be copied while all nodes that hold it are alive, because each holds the parts
of its own ranks only. A lost version is recomputed if the operations that led to it were kept, once
the node has been away for as long as that takes (`rebuilding`). The WPG leaves its group and waits
for GPUs with its original creation time. No operation is lost, because queue and log stay. Any
other WPG whose durable version is on the lost node waits for that node; if lost nodes do not come
back, its job ends.
"""

from collections.abc import Iterator

from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.accounting.fair_shares import begin_to_wait
from plexrl.scheduler.accounting.profiler import forget_open_cycle
from plexrl.scheduler.jobs.lifecycle import end_job, has_gpu, stop
from plexrl.scheduler.operations.deadlines.cancellation import interrupt_all
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.cluster import Cluster, Context, hold
from plexrl.scheduler.placement.placement import vacate
from plexrl.scheduler.placement.rendezvous import may_span
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.recovery.rebuilding import rebuild
from plexrl.scheduler.recovery.relocation import drain
from plexrl.scheduler.rules.settings import Settings, Situation, Step
from plexrl.scheduler.state.job import change_job
from plexrl.scheduler.state.machines.job_states import JobTrigger
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Group, Node, State
from plexrl.wire.messages import ReleaseState, StopWorkers


def reconcile_node(context: Context, name: NodeId, now: float) -> None:
    """Move all WPGs off the node that should not stay there and can move now."""
    node = context.state.nodes[name]
    if not node.alive:
        if _is_written_off(context.settings, node, now):
            for deployment in [
                *placed_on(context.cluster.capacity, name),
                *_with_state_on(context.cluster.queues, name),
            ]:
                _evacuate(context, deployment, now)
    elif node.is_draining:
        for group in drain(context.cluster, name, now):
            context.effects.touch(group)
    else:
        replace_shrunk(context, name, now)


def replace_shrunk(context: Context, name: NodeId, now: float) -> None:
    """Move the WPGs on GPUs that the node no longer has, whose workers there are gone, and those
    that may not span it any more."""
    gpus = context.state.nodes[name].gpus
    for deployment in placed_on(context.cluster.capacity, name):
        has_gpus = all(rank.gpu < gpus for rank in deployment.placement.ranks if rank.node == name)
        if has_gpus and may_span(context.state, deployment):
            continue
        if deployment.wpg.state not in (WpgState.RECOVERING, WpgState.MIGRATING):
            reason = f"node {name!r} came back with {gpus} GPUs"
            if has_gpus:
                reason = f"node {name!r} came back with another fabric, so groups do not span it"
            if not stop(context, deployment, reason, now):
                continue
            # Workers that still run there must not be adopted.
            deployment.wpg.processes.outdate()
        _evacuate(context, deployment, now)


def may_displace(situation: Situation, deployment: Deployment) -> bool:
    """Whether the WPG can release its GPUs and continue from its state elsewhere."""
    if deployment.work.running or deployment.wpg.moving is not None:
        return False
    return deployment.wpg.state != WpgState.MIGRATING and _survives(situation, deployment)


def displace(context: Context, deployment: Deployment, reason: str, now: float) -> None:
    """Take the GPUs of a WPG that runs nothing; it waits for others and keeps its queue."""
    assert may_displace(context, deployment), f"{deployment.deployment} cannot be moved"
    deployment.work.replay.end_replay()
    forget_open_cycle(deployment)
    if deployment.work.queue:
        deployment.demand.burst.want(now)
    deployment.demand.burst.interrupt()
    deployment.wpg.moves.displaced(reason)
    _evacuate(context, deployment, now)


def leaving_fillers(step: Step, group: Group) -> list[Deployment]:
    """Fillers to displace now, because all members have left their group; others are interrupted
    first."""
    state = step.state
    fillers = list(map(state.deployment, group.fillers))
    for filler in fillers:
        interrupt_all(step, filler)
    return [filler for filler in fillers if may_displace(step, filler)]


def placed_on(capacity: Capacity, node: NodeId) -> Iterator[Deployment]:
    """The deployments with ranks on a node, oldest group first. Skips those that lose their GPUs
    during the iteration, because handling one may end the job of another."""
    members = {
        member: None
        for name in capacity.inventory.groups_on(node)
        for member in residents(capacity.state.groups[name])
    }
    for deployment in map(capacity.state.deployment, members):
        if deployment.placement.groups:
            yield deployment


def residents(group: Group) -> list[DeploymentId]:
    """Members and fillers."""
    return [*group.members, *group.fillers]


def awaited(state: State, deployment: Deployment) -> tuple[NodeId, ...]:
    """The nodes that the WPG needs to continue: it has ranks on them, or only they hold its state.
    Empty if it waits for its processes only."""
    nodes = state.nodes
    dead = [node for node in deployment.wpg.stored.nodes if not nodes[node].alive]
    if deployment.work.replay.durable_seq and dead:
        return tuple(sorted(dead))
    lacking = {rank.node for rank in deployment.placement.ranks if not has_gpu(state, rank)}
    return tuple(sorted(lacking))


def _with_state_on(queues: Queues, node: NodeId) -> list[Deployment]:
    """The deployments whose durable version is on the node while they have no ranks there: the copy
    is not complete, or they wait for GPUs."""
    placed = {name: None for group in queues.state.groups.values() for name in residents(group)}
    waiting = map(queues.state.deployment, [*queues.waiting.displaced, *queues.fillers])
    in_order = sorted(waiting, key=lambda each: each.serial)
    found = [*map(queues.state.deployment, placed), *in_order]
    return [
        deployment
        for deployment in found
        if deployment.wpg.state in (WpgState.MIGRATING, WpgState.WAITING)
        and node in deployment.wpg.stored.nodes
        and node not in deployment.placement.nodes
    ]


def _is_written_off(settings: Settings, node: Node, now: float) -> bool:
    if node.lost_at is None:
        return False
    return node.is_draining or now >= node.lost_at + settings.config.node_replace_s


def _survives(situation: Situation, deployment: Deployment) -> bool:
    if not deployment.work.replay.durable_seq:
        return True
    nodes = situation.state.nodes
    return situation.settings.config.migrates and all(
        nodes[node].alive for node in deployment.wpg.stored.nodes
    )


def _evacuate(context: Context, deployment: Deployment, now: float) -> None:
    """Take the WPG off its group and enqueue it, if its state survives or can be recomputed."""
    state, cluster, effects = context.state, context.cluster, context.effects
    if deployment.wpg.state == WpgState.STOPPED:
        # Its job ended because another deployment was lost.
        return
    if not _survives(context, deployment) and not rebuild(context.step(now), deployment):
        reason = _loss(context, deployment)
        if reason is not None:
            end_job(context, state.job(deployment.job), JobTrigger.FAILED, reason, now)
        return
    if deployment.wpg.state == WpgState.WAITING:
        return
    nodes = deployment.placement.nodes
    effects.emit(
        StopWorkers(
            deployment=deployment.deployment,
            incarnation=deployment.wpg.processes.incarnation,
            nodes=nodes,
        )
    )
    unwanted = tuple(node for node in nodes if node not in deployment.wpg.stored.nodes)
    if unwanted:
        # Incomplete copies of the version.
        effects.emit(ReleaseState(deployment=deployment.deployment, nodes=unwanted))
    hold(cluster, deployment, -1, now)
    effects.touch_all(vacate(cluster, deployment, now))
    deployment.placement.clear()
    deployment.wpg.displace()
    if not deployment.spec.preemptible:
        change_job(state.job(deployment.job), JobTrigger.DISPLACED)
    _enqueue(cluster, deployment, now)
    for moving in cluster.queues.relocating_in_order():
        # A relocation may have waited for this WPG to pull weights.
        effects.touch_all(moving.placement.groups)


def _loss(situation: Situation, deployment: Deployment) -> str | None:
    """Why the job cannot continue; None: its state comes back with its nodes."""
    settings = situation.settings
    lost = [node for node in deployment.wpg.stored.nodes if not situation.state.nodes[node].alive]
    if settings.config.lost_nodes_return or not lost:
        return None
    return (
        f"the state of {deployment.deployment!r} was on {', '.join(sorted(lost))}, which is lost, "
        f"and the operations that led to it exceed those kept for a rebuild "
        f"({settings.config.rebuild_operations}): start a job from its newest checkpoint"
    )


def _enqueue(cluster: Cluster, deployment: Deployment, now: float) -> None:
    if not deployment.spec.preemptible:
        begin_to_wait(
            cluster.holdings,
            cluster.queues.waiting.by_tenant,
            cluster.state.job(deployment.job).tenant,
            now,
        )
    cluster.queues.wait(deployment)
    cluster.queues.waiting.retry_all()
