"""Nodes that come, go and come back, and what becomes of the workers they had."""

from plexrl.scheduler.commands import ReleaseState, StopWorkers
from plexrl.scheduler.context import Context
from plexrl.scheduler.events import NodeJoined, NodeLost
from plexrl.scheduler.lifecycle import restart, send_launch, worker_ready
from plexrl.scheduler.state import Node, WpgState


def node_joined(context: Context, event: NodeJoined, now: float) -> None:
    """A node is there (again), with these workers and these states."""
    known = context.state.nodes.get(event.node)
    context.state.nodes[event.node] = Node(
        node=event.node,
        gpus=event.gpus,
        gpu_memory_bytes=event.gpu_memory_bytes,
        host_memory_bytes=event.host_memory_bytes,
        statemanager=event.statemanager,
        node_type=event.node_type,
        block=event.block,
        nvme_bytes=event.nvme_bytes,
        is_draining=known is not None and known.is_draining,
    )
    context.inventory.node_changed(context.state.nodes[event.node])
    seen = {(worker.deployment, worker.rank): worker for worker in event.workers}
    wanted = set()
    for deployment in list(context.state.deployments.values()):
        ranks = [rank.rank for rank in deployment.ranks if rank.node == event.node]
        if not ranks or deployment.state in (WpgState.WAITING, WpgState.STOPPED):
            continue
        missing = False
        for rank in ranks:
            worker = seen.get((deployment.deployment, rank))
            if worker is not None and worker.incarnation == deployment.incarnation:
                wanted.add((worker.deployment, worker.rank))
                worker_ready(context, deployment, rank, worker.address)
            else:
                missing = True
        if missing and deployment.is_ready:
            restart(context, deployment, f"node {event.node!r} came back without it", now)
        elif missing or not deployment.is_ready:
            send_launch(context, deployment)
    for worker in event.workers:
        if (worker.deployment, worker.rank) not in wanted:
            context.emit(
                StopWorkers(
                    deployment=worker.deployment,
                    incarnation=worker.incarnation,
                    nodes=(event.node,),
                )
            )
    live = context.state.deployments
    for name in event.states:
        if name not in live or live[name].state == WpgState.STOPPED:
            context.emit(ReleaseState(deployment=name, nodes=(event.node,)))
    context.place_waiting = True


def node_lost(context: Context, event: NodeLost, now: float) -> None:
    """A node is gone, and all its workers with it."""
    node = context.state.nodes.get(event.node)
    if node is None:
        return
    node.alive = False
    context.inventory.node_changed(node)
    for deployment in list(context.state.deployments.values()):
        here = [rank.rank for rank in deployment.ranks if rank.node == event.node]
        if not here or deployment.state in (WpgState.WAITING, WpgState.STOPPED):
            continue
        if deployment.state == WpgState.RECOVERING:
            # It is launched again when the node is back; whoever was ready there is dead.
            for rank in here:
                deployment.addresses.pop(rank, None)
        else:
            restart(context, deployment, f"node {event.node!r} was lost", now)
