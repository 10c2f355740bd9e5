"""WPGs whose node is lost, or has come back with fewer GPUs: other GPUs for those that can follow.

A WPG can follow where its state survives: without a durable version the replay log rebuilds all of
it; a version can be copied while all nodes that hold it live, for each has the parts of its own
ranks only; and one that is lost is computed anew where what led to it was kept, once the node has
been away for as long as that takes (`rebuilding`). The WPG leaves its group and waits for GPUs like
a new one, ahead of others as one whose turn came long ago; no operation is lost, for queue and log
stay. Any other whose durable version lies on the lost node waits for that node, or, where lost
nodes do not come back, its job ends.
"""

from collections.abc import Iterator

from plexrl.ids import NodeId
from plexrl.scheduler.admission.fair_shares import begin_to_wait
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.jobs.lifecycle import end_job, has_gpu, stop
from plexrl.scheduler.jobs.profiler import forget_open_cycle
from plexrl.scheduler.placement.placement import vacate
from plexrl.scheduler.placement.rebuilding import rebuild
from plexrl.scheduler.placement.relocation import drain
from plexrl.scheduler.state import wpg
from plexrl.scheduler.state.commands import ReleaseState, StopWorkers
from plexrl.scheduler.state.job import change_job
from plexrl.scheduler.state.machines.job_states import JobTrigger
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Node


def reconcile_node(context: Context, name: NodeId, now: float) -> None:
    """Move off the node whatever should not stay there, as far as it can go now."""
    node = context.state.nodes[name]
    if not node.alive:
        if _is_given_up(context, node, now):
            for deployment in [*placed_on(context, name), *_elsewhere(context, name)]:
                _replace(context, deployment, now)
    elif node.is_draining:
        drain(context, name, now)
    else:
        replace_shrunk(context, name, now)


def replace_shrunk(context: Context, name: NodeId, now: float) -> None:
    """Move the WPGs on GPUs that the node has no more; their workers there are gone."""
    gpus = context.state.nodes[name].gpus
    for deployment in placed_on(context, name):
        if all(rank.gpu < gpus for rank in deployment.ranks if rank.node == name):
            continue
        if deployment.state not in (WpgState.RECOVERING, WpgState.MIGRATING):
            reason = f"node {name!r} came back with {gpus} GPUs"
            if not stop(context, deployment, reason, now):
                continue
            # Such of its workers as are still there are not those that are wanted.
            deployment.incarnation += 1
        _replace(context, deployment, now)


def may_displace(context: Context, deployment: Deployment) -> bool:
    """Whether the WPG could give its GPUs back and go on from its state elsewhere."""
    if deployment.running or deployment.moving is not None:
        return False
    return deployment.state != WpgState.MIGRATING and _survives(context, deployment)


def displace(context: Context, deployment: Deployment, reason: str, now: float) -> None:
    """Have a WPG that runs nothing give its GPUs back and wait for others; its queue stays."""
    assert may_displace(context, deployment), f"{deployment.deployment} cannot be moved"
    deployment.replaying.clear()
    forget_open_cycle(deployment)
    if deployment.queue:
        deployment.wants_since = now
    deployment.burst_started_at = None
    deployment.idle_since = None
    deployment.moved_because = reason
    _replace(context, deployment, now)


def placed_on(context: Context, node: NodeId) -> Iterator[Deployment]:
    """The deployments with ranks on a node, by the age of their groups; without those that lose
    their GPUs while the ones before them are looked at, for their job may end by these."""
    members = [
        context.deployment(member)
        for name in context.inventory.groups_on(node)
        for member in context.state.groups[name].members
    ]
    for deployment in members:
        if deployment.group is not None:
            yield deployment


def awaited(context: Context, deployment: Deployment) -> tuple[NodeId, ...]:
    """The nodes without which the WPG cannot go on: it has ranks on them that no launch reaches, or
    only they hold its state. None for one that waits for nothing but its processes."""
    nodes = context.state.nodes
    dead = [each for each in deployment.state_nodes if not nodes[each].alive]
    if deployment.durable_seq and dead:
        return tuple(sorted(dead))
    lacking = {rank.node for rank in deployment.ranks if not has_gpu(context, rank)}
    return tuple(sorted(lacking))


def _elsewhere(context: Context, node: NodeId) -> list[Deployment]:
    """The deployments without ranks on a node whose durable version lies there: it was yet to be
    copied to where they are, or they wait for GPUs."""
    placed = [name for group in context.state.groups.values() for name in group.members]
    found = map(context.deployment, [*placed, *sorted(context.waiting.displaced)])
    return [
        deployment
        for deployment in found
        if deployment.state in (WpgState.MIGRATING, WpgState.WAITING)
        and node in deployment.state_nodes
        and node not in deployment.nodes
    ]


def _is_given_up(context: Context, node: Node, now: float) -> bool:
    if node.lost_at is None:
        return False
    return node.is_draining or now >= node.lost_at + context.config.node_replace_s


def _survives(context: Context, deployment: Deployment) -> bool:
    if not deployment.durable_seq:
        return True
    nodes = context.state.nodes
    return context.config.migrates and all(nodes[each].alive for each in deployment.state_nodes)


def _replace(context: Context, deployment: Deployment, now: float) -> None:
    """Take the WPG off its group and have it placed anew, if there is something to go on from."""
    if deployment.state == WpgState.STOPPED:
        # Its job has ended by the loss of another of its deployments.
        return
    if not _survives(context, deployment) and not rebuild(context, deployment, now):
        _give_up(context, deployment, now)
        return
    if deployment.state == WpgState.WAITING:
        return
    nodes = deployment.nodes
    context.emit(
        StopWorkers(
            deployment=deployment.deployment, incarnation=deployment.incarnation, nodes=nodes
        )
    )
    unwanted = tuple(each for each in nodes if each not in deployment.state_nodes)
    if unwanted:
        # Copies of a version that were on their way there.
        context.emit(ReleaseState(deployment=deployment.deployment, nodes=unwanted))
    context.hold(deployment, -1, now)
    vacate(context, deployment, now)
    wpg.displace(deployment)
    change_job(context.job(deployment.job), JobTrigger.DISPLACED)
    _enqueue(context, deployment, now)
    for name in sorted(context.relocating):
        # One that waited for this WPG to pull its weights waits no more.
        context.touch(context.deployment(name).group)


def _give_up(context: Context, deployment: Deployment, now: float) -> None:
    lost = [each for each in deployment.state_nodes if not context.state.nodes[each].alive]
    if context.config.lost_nodes_return or not lost:
        return
    reason = (
        f"the state of {deployment.deployment!r} lay on {', '.join(sorted(lost))}, lost, and the "
        f"operations that led to it were more than are kept to repeat them "
        f"({context.config.rebuild_operations}): begin a job from its newest checkpoint"
    )
    end_job(context, context.job(deployment.job), JobTrigger.FAILED, reason, now)


def _enqueue(context: Context, deployment: Deployment, now: float) -> None:
    begin_to_wait(context, context.job(deployment.job).tenant, now)
    context.wait(deployment)
    context.place_waiting = True
