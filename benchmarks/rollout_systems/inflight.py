"""A limit on the data in flight, with interruptible generation, as AReaL.

While version v is trained, at most (v + 1 + η)·B groups have been started (AReaL §5.1). Every
update interrupts all instances; they load the new version, and the KV cache of what was running is
computed again on the same instance: such systems have one version and a fixed assignment of
trajectories (StaleFlow §2.4). With `is_rebalanced` an update also distributes all trajectories
anew, which no system of that class does. Two orders of training are possible:

* In the order of the prompts. The limit then bounds the staleness of every trajectory by η, since
  batch v has no prompt that was started before version v - η. Training waits for the slowest
  response of the batch.
* In the order of completion, older prompts first (AReaL §5.1). Training waits for nobody, and the
  bound is on the number of groups only: a long trajectory is trained later than η versions after
  its start. The reported staleness shows it.
"""

from collections.abc import Sequence

from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.systems.dispatch import dispatch
from plexrl.sim.rollout.systems.groups import PromptGroups
from plexrl.sim.rollout.world import World


class InFlight:
    """At most (η + 1) batches in flight."""

    def __init__(
        self, world: World, staleness: int, *, in_order: bool = True, is_rebalanced: bool = False
    ) -> None:
        """`in_order`: prompts are trained in their order. `is_rebalanced`: every update distributes
        the trajectories anew."""
        self._world = world
        self._staleness = staleness
        self._in_order = in_order
        self._is_rebalanced = is_rebalanced
        self._groups = PromptGroups(world.prompts)
        self._ready: dict[int, list[SimulatedTrajectory]] = {}

    def start(self) -> None:
        """See `Policy`."""
        self._admit()

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        for group in self._groups.finished(trajectories):
            self._ready[group[0].group] = group
        self._train()

    def trained(self) -> None:
        """See `Policy`."""
        world = self._world
        stopped = []
        for each in world.instances:
            removed = each.interrupt_all(world.now)
            world.touch(each, self)
            each.pull(world.version, world.now)
            if self._is_rebalanced:
                stopped += removed
            else:
                each.route(removed, world.now)
                world.touch(each, self)
        stopped.sort(key=lambda each: each.number)
        self._admit(stopped)
        self._train()

    def _admit(self, stopped: Sequence[SimulatedTrajectory] = ()) -> None:
        """Route stopped trajectories, then new ones up to the limit."""
        world = self._world
        limit = (world.version + 1 + self._staleness) * world.setting.batch_groups
        new = self._groups.take(limit - self._groups.started)
        dispatch(world, self, [*stopped, *new])

    def _train(self) -> None:
        world = self._world
        batch = world.setting.batch_groups
        if world.is_training:
            return
        if self._in_order:
            first = world.version * batch
            taken = [group for group in range(first, first + batch) if group in self._ready]
        else:
            taken = sorted(self._ready)[:batch]
        if len(taken) == batch:
            world.train([each for group in taken for each in self._ready.pop(group)], self)
