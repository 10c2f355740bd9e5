"""A limit on the data in flight, with interruptible generation, as AReaL.

While version v is trained, at most (v + 1 + η)·B groups have been started (AReaL §5.1), and a step
trains the oldest B of the groups that have ended. Every update interrupts all instances; they load
the new version, and what was running is routed anew and its KV cache recomputed.

The limit bounds how far rollouts run ahead, not the staleness of each trajectory: nothing waits for
a long trajectory, so that it may be trained later than η versions after its start. The reported
staleness shows it. The vanilla strategies of `staleflow` are the same system with the bound kept.
"""

from collections.abc import Sequence

from plexrl.sim.rollout.engine.trajectory import Trajectory
from plexrl.sim.rollout.systems.dispatch import dispatch
from plexrl.sim.rollout.systems.groups import Groups
from plexrl.sim.rollout.world import World


class InFlight:
    """At most (η + 1) batches in flight."""

    def __init__(self, world: World, staleness: int) -> None:
        self._world = world
        self._staleness = staleness
        self._groups = Groups(world.prompts)
        self._ready: list[list[Trajectory]] = []

    def start(self) -> None:
        """See `Policy`."""
        self._admit()

    def finished(self, trajectories: Sequence[Trajectory]) -> None:
        """See `Policy`."""
        self._ready += self._groups.finished(trajectories)
        self._train()

    def trained(self) -> None:
        """See `Policy`."""
        world = self._world
        stopped = []
        for each in world.instances:
            stopped += each.interrupt_all(world.now)
            world.touch(each, self)
            each.pull(world.version, world.now)
        stopped.sort(key=lambda each: each.number)
        self._admit(stopped)
        self._train()

    def _admit(self, stopped: Sequence[Trajectory] = ()) -> None:
        """Route stopped trajectories, then new ones up to the limit."""
        world = self._world
        batch = world.setting.batch_groups
        limit = (world.version + 1 + self._staleness) * batch
        new = self._groups.take(limit - self._groups.started)
        dispatch(world, self, [*stopped, *new], by_tokens=True)

    def _train(self) -> None:
        world = self._world
        batch = world.setting.batch_groups
        if world.is_training or len(self._ready) < batch:
            return
        self._ready.sort(key=lambda group: group[0].group)
        taken, self._ready = self._ready[:batch], self._ready[batch:]
        world.train([each for group in taken for each in group], self)
