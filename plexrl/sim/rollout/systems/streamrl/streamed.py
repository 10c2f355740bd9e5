"""Disaggregated stream generation, synchronous or one step ahead (StreamRL §4.1).

Batch b is trained as version b, on GPUs of its own, while it is generated: complete prompts wait
for the trainer, which takes them as `DynamicBatches` does. Batch b may be generated when version
b - η has reached the instances, `pull_s` after its training:

* η = 0: the weights of a batch are those that it trains. Generation waits for the update.
* η = 1: while batch b is trained, instances that have ended their share of it go on with batch
  b + 1 and the newest weights that have arrived. Neither the update nor its transfer is waited for,
  and no sample is older than one step.
"""

from collections import deque
from collections.abc import Sequence

from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.systems.groups import Groups
from plexrl.sim.rollout.systems.streamrl.dynamic_batches import FILL_TOKENS, DynamicBatches
from plexrl.sim.rollout.systems.streamrl.skewness import SkewnessAware
from plexrl.sim.rollout.world import World


class Streamed:
    """Generation and training of neighbouring batches at the same time."""

    def __init__(self, world: World, staleness: int, skewness: SkewnessAware) -> None:
        self._world = world
        self._staleness = staleness
        self._skewness = skewness
        self._groups = Groups(world.prompts)
        self._arrived = 0
        """Newest version that has reached the instances."""
        self._shares: list[deque[list[SimulatedTrajectory]]] = [deque() for _ in world.instances]
        """For each instance, its shares of batches that it has not begun."""
        self._running = [0] * len(world.instances)
        """For each instance, the trajectories of its present share that have not ended."""
        self._complete: dict[int, list[SimulatedTrajectory]] = {}
        """Complete prompts by batch."""
        self._trainer = self._idle_trainer()

    def start(self) -> None:
        """See `Policy`."""
        for _ in range(self._staleness + 1):
            self._admit()

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        world = self._world
        for trajectory in trajectories:
            self._running[trajectory.segments[-1].instance] -= 1
        for group in self._groups.finished(trajectories):
            batch = group[0].group // world.setting.batch_groups
            self._complete.setdefault(batch, []).extend(group)
            if batch == world.version:
                self._trainer.complete(sum(each.length for each in group), world.now)
        for number in sorted({trajectory.segments[-1].instance for trajectory in trajectories}):
            self._begin_share(world.instances[number])
        self._train()

    def trained(self) -> None:
        """See `Policy`."""
        world = self._world
        version = world.version
        world.at(world.now + world.setting.costs.pull_s, lambda: self._arrive(version))
        self._trainer = self._idle_trainer()
        waiting = self._complete.get(version, ())
        self._trainer.complete(sum(each.length for each in waiting), world.now)
        self._train()

    def _arrive(self, version: int) -> None:
        self._arrived = version
        self._admit()

    def _admit(self) -> None:
        """Divide the next batch."""
        world = self._world
        batch = self._groups.take(world.setting.batch_groups)
        shares = self._skewness.shares(batch, len(world.instances), world.instances[0].costs)
        if self._staleness and self._groups.started // world.setting.batch_groups % 2:
            # Long samples of neighbouring batches run at the same time, on other instances.
            shares.reverse()
        for instance, share in zip(world.instances, shares, strict=True):
            if share:
                self._shares[instance.number].append(share)
            self._begin_share(instance)

    def _begin_share(self, instance: Instance) -> None:
        """Begin the next share with the newest weights, if the last one has ended."""
        shares = self._shares[instance.number]
        if self._running[instance.number] or not shares:
            return
        share = shares.popleft()
        self._running[instance.number] = len(share)
        # The weights have been transferred meanwhile.
        instance.pull(self._arrived, self._world.now, pull_s=0.0)
        instance.route(share, self._world.now)
        self._world.touch(instance, self)

    def _train(self) -> None:
        """Train what is left, if the whole batch is there."""
        world = self._world
        batch = self._complete.get(world.version, ())
        if world.is_training or len(batch) < world.setting.batch_trajectories:
            return
        tokens = sum(each.length for each in batch)
        left = min(float(tokens), self._trainer.left_tokens(world.now))
        world.train(self._complete.pop(world.version), self, done_tokens=tokens - left)

    def _idle_trainer(self) -> DynamicBatches:
        world = self._world
        per_token_s = world.setting.costs.train_gpu_s_per_token / world.train_gpus
        rate = 1.0 / per_token_s if per_token_s else float("inf")
        return DynamicBatches(rate, FILL_TOKENS * world.train_gpus, world.now)
