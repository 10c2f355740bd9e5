"""The coordinator with parts of batches (`rollout.parts`): stream generation (StreamRL §4.1).

A complete prompt occupies the earliest place of the buffers, and stays there. So the first complete
prompts, as many as a batch has, are the next batch: they go to the trainer as they are complete. It
takes what waits when it is idle and that fills its GPUs. Parameters change when the whole batch is
trained.
"""

from collections.abc import Sequence
from itertools import islice

from plexrl.rollout.coordinator.messages import Train
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.setting import System
from plexrl.sim.rollout.systems.coordinated import Coordinated
from plexrl.sim.rollout.systems.dynamic_batches import FILL_TOKENS, DynamicBatches
from plexrl.sim.rollout.world import World


class Streamed(Coordinated):
    """Prompts are trained while others of their batch are generated."""

    def __init__(self, world: World, system: System) -> None:
        super().__init__(world, system)
        self._left: dict[int, int] = {}
        """Samples that are missing, by prompt of which some are generated."""
        self._tokens: dict[int, int] = {}
        """Tokens by prompt of which some are generated."""
        self._complete: dict[int, int] = {}
        """Tokens of complete prompts that are not trained, in the order of completion."""
        self._trainer = self._idle_trainer()

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        world = self._world
        for trajectory in trajectories:
            prompt = trajectory.group
            self._left.setdefault(prompt, world.setting.workload.group_size)
            self._left[prompt] -= 1
            self._tokens[prompt] = self._tokens.get(prompt, 0) + trajectory.length
            if not self._left[prompt]:
                del self._left[prompt]
                self._complete[prompt] = self._tokens.pop(prompt)
                if len(self._complete) <= world.setting.batch_groups and not world.is_training:
                    self._trainer.complete(self._complete[prompt], world.now)
        super().finished(trajectories)

    def trained(self) -> None:
        """See `Policy`."""
        world = self._world
        self._trainer = self._idle_trainer()
        for tokens in islice(self._complete.values(), world.setting.batch_groups):
            self._trainer.complete(tokens, world.now)
        super().trained()

    def _train(self, command: Train) -> None:
        world = self._world
        batch = [self._trajectories.pop(each.trajectory) for each in command.batch]
        for prompt in {each.group for each in batch}:
            del self._complete[prompt]
        tokens = float(sum(each.length for each in batch))
        left = min(tokens, self._trainer.left_tokens(world.now))
        world.train(batch, self, done_tokens=tokens - left)
        self._add_groups()

    def _idle_trainer(self) -> DynamicBatches:
        world = self._world
        per_token_s = world.setting.costs.train_gpu_s_per_token / world.train_gpus
        rate = 1.0 / per_token_s if per_token_s else float("inf")
        return DynamicBatches(rate, FILL_TOKENS * world.train_gpus, world.now)
