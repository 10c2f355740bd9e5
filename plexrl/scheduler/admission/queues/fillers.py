"""Places preemptible deployments: fillers of the idle time of groups that others share.

A filler joins a group with as many GPUs as it has workers and with memory for its state, one to a
group, the emptiest first. It never forms a group, is in no plan, and counts in no load, contention
or quota. When the last member leaves a group, its filler does too, and waits for another group.
"""

from plexrl.scheduler.placement.capacity.needs import holds
from plexrl.scheduler.placement.cluster import Cluster, hold
from plexrl.scheduler.placement.placement import put_on
from plexrl.scheduler.rules.switch_cost import load_s
from plexrl.scheduler.state.deployment.placement import PlacementRecord
from plexrl.scheduler.state.records import Deployment, Group

WAY = "filler"
"""The way of its placement, for `explain`."""


def place_fillers(cluster: Cluster, now: float) -> list[Deployment]:
    """Place all waiting fillers that a group can take; returns them."""
    if not cluster.queues.fillers:
        return []
    state = cluster.state
    free = [
        group
        for group in state.groups.values()
        if group.members and not group.fillers and cluster.capacity.inventory.takes_members(group)
    ]
    free.sort(key=lambda group: (cluster.capacity.inventory.index.load(group.group), group.serial))
    waiting = [state.deployment(name) for name in cluster.queues.fillers]
    waiting.sort(key=lambda each: (-state.job(each.job).priority, each.serial))
    placed = []
    for deployment in waiting:
        suiting = (
            each
            for each in free
            if len(each.gpus) == deployment.spec.workers
            and holds(cluster.capacity.inventory, each, deployment)
        )
        group = next(suiting, None)
        if group is not None:
            free.remove(group)
            _join(cluster, group, deployment, now)
            placed.append(deployment)
    return placed


def _join(cluster: Cluster, group: Group, deployment: Deployment, now: float) -> None:
    cluster.queues.stop_waiting(deployment.deployment)
    group.fillers.append(deployment.deployment)
    put_on(deployment, (group,))
    hold(cluster, deployment, +1, now)
    cluster.capacity.inventory.reserve(deployment, strict=False)
    deployment.placement.note(
        PlacementRecord(
            at=now,
            way=WAY,
            group=group.group,
            members=len(group.members),
            shift_s=0.0,
            setup_s=load_s(cluster.state, deployment),
            overlap_s=0.0,
            interference_s=0.0,
        )
    )
