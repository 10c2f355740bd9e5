"""Skewness-aware dispatch of a batch (StreamRL §5.3, Alg. 2).

The division of the instances is the one that a live rollout uses
(`plexrl.rollout.policies.length_dispatch`). As in the paper the whole batch is dispatched at once,
and each instance begins with what is expected to be longest. The distribution of lengths is that of
the batch before, and at first that of a batch which the model has generated before the training.
"""

from collections.abc import Sequence

from plexrl.latency.costs import EngineCosts
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.length_dispatch import LONG_PART, LengthSpread, divide
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.setting import Setting
from plexrl.sim.rollout.systems.streamrl.ranks import expected_ranks, mean_lengths
from plexrl.sim.rollout.workload import Prompts
from plexrl.sim.rollout.world import Policy, World

EARLIER = 1 << 24
"""Number of the first prompt that was generated before the training."""


class SkewnessAware:
    """Assigns batches to instances by ranks."""

    def __init__(self, setting: Setting, recall: float) -> None:
        """`recall`: part of the longest fifth of the prompts that the ranks find."""
        self._seed = setting.workload.seed
        self._recall = recall
        self._prompt_tokens = setting.workload.prompt_tokens
        self._recent = [each.response_tokens for each in earlier_batch(setting)]

    def __call__(
        self, world: World, policy: Policy, trajectories: Sequence[SimulatedTrajectory]
    ) -> None:
        """Dispatch a batch to idle instances, as `dispatch` does."""
        shares = self.shares(trajectories, len(world.instances), world.instances[0].costs)
        for instance, share in zip(world.instances, shares, strict=True):
            instance.route(share, world.now)
            world.touch(instance, policy)

    def shares(
        self, trajectories: Sequence[SimulatedTrajectory], instances: int, costs: EngineCosts
    ) -> list[list[SimulatedTrajectory]]:
        """The trajectories of a batch that each instance gets, in its order."""
        expected = expected_ranks(
            mean_lengths(
                [(trajectory.group, trajectory.response_tokens) for trajectory in trajectories]
            ),
            self._recall,
            self._seed,
        )
        ordered = sorted(trajectories, key=lambda each: (-expected[each.group], each.number))
        long = ordered[: int(LONG_PART * len(ordered))]
        regular = ordered[len(long) :]
        division = divide(
            CostModel(k1=costs.k1, k2=costs.k2, k3=costs.k3, k4=costs.k4, k5=1.0),
            long=len(long),
            regular=len(regular),
            prompt_tokens=self._prompt_tokens,
            spread=LengthSpread.of(self._recent),
            instances=instances,
            kv_budget=costs.kv_tokens,
        )
        self._recent = [trajectory.response_tokens for trajectory in trajectories]
        if division is None:
            return [ordered[at::instances] for at in range(instances)]
        return [
            *(long[at :: division.long] for at in range(division.long)),
            *(regular[at :: division.regular] for at in range(division.regular)),
        ]


def earlier_batch(setting: Setting) -> list[SimulatedTrajectory]:
    """A batch that the model has generated before the training."""
    prompts = Prompts(setting.workload)
    return [
        each
        for prompt in range(EARLIER, EARLIER + setting.batch_groups)
        for each in prompts.group(prompt)
    ]
