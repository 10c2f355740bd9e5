"""One step of asynchrony on separate GPUs, as verl-pipeline."""

from collections.abc import Sequence

from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.systems.dispatch import dispatch
from plexrl.sim.rollout.systems.groups import PromptGroups
from plexrl.sim.rollout.world import World


class OneStep:
    """Generates batch i + 1 with version i while batch i is trained; then all meet.

    A batch has one version. When a batch is generated and the one before it is trained, all
    instances load the newest version and both sides begin again.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups = PromptGroups(world.prompts)
        self._ready: list[SimulatedTrajectory] = []

    def start(self) -> None:
        """See `Policy`."""
        self._generate()

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        for group in self._groups.finished(trajectories):
            self._ready += group
        self._exchange()

    def trained(self) -> None:
        """See `Policy`."""
        self._exchange()

    def _exchange(self) -> None:
        world = self._world
        if world.is_training or len(self._ready) < world.setting.batch_trajectories:
            return
        batch, self._ready = self._ready, []
        if world.version:
            for each in world.instances:
                each.pull(world.version, world.now)
        world.train(batch, self)
        self._generate()

    def _generate(self) -> None:
        world = self._world
        dispatch(world, self, self._groups.take(world.setting.batch_groups))
