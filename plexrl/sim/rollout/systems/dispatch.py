"""Distributes trajectories over instances that have the same version."""

import heapq
from collections.abc import Sequence

from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import Trajectory
from plexrl.sim.rollout.world import Policy, World


def dispatch(
    world: World, policy: Policy, trajectories: Sequence[Trajectory], *, by_tokens: bool = False
) -> None:
    """Route each trajectory to the instance with the fewest requests, or with the fewest tokens.

    Members of a group follow each other, so that they go to different instances.
    """
    instances = world.instances
    loads = [(_load(each, by_tokens), each.number) for each in instances]
    heapq.heapify(loads)
    chosen: dict[int, list[Trajectory]] = {}
    for each in trajectories:
        load, number = loads[0]
        chosen.setdefault(number, []).append(each)
        heapq.heapreplace(loads, (load + (each.length if by_tokens else 1), number))
    for number, routed in sorted(chosen.items()):
        instances[number].route(routed, world.now)
        world.touch(instances[number], policy)


def _load(instance: Instance, by_tokens: bool) -> int:
    if not by_tokens:
        return instance.running_count + len(instance.waiting)
    return instance.kv + sum(each.length for each in instance.waiting)
