"""Synchronous rollout, rewards and training on the same GPUs, as verl."""

from collections.abc import Sequence

from plexrl.sim.rollout.engine.rewards import Rewards
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.systems.dispatch import Dispatcher, dispatch
from plexrl.sim.rollout.systems.groups import PromptGroups
from plexrl.sim.rollout.world import World


class Synchronous:
    """Generates a batch on all GPUs, grades it, trains it on all GPUs, updates all instances,
    repeats."""

    def __init__(self, world: World, dispatcher: Dispatcher = dispatch) -> None:
        """`dispatcher` distributes each batch over the instances."""
        self._world = world
        self._dispatch = dispatcher
        self._groups = PromptGroups(world.prompts)
        self._ready: list[SimulatedTrajectory] = []
        self._rewards = Rewards(world.setting.rewards, world.setting.workload.seed)

    def start(self) -> None:
        """See `Policy`."""
        self._generate()

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        for group in self._groups.finished(trajectories):
            self._ready += group
        if len(self._ready) == self._world.setting.batch_trajectories:
            batch, self._ready = self._ready, []
            world = self._world
            reward_s = self._rewards.stage_s({each.group for each in batch})
            world.at(
                world.now + reward_s,
                lambda: world.train(batch, self, reward_s=reward_s),
            )

    def trained(self) -> None:
        """See `Policy`."""
        for instance in self._world.instances:
            instance.pull(self._world.version, self._world.now)
        self._generate()

    def _generate(self) -> None:
        world = self._world
        self._dispatch(world, self, self._groups.take(world.setting.batch_groups))
