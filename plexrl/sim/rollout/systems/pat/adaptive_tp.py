"""Synchronous rollout whose tensor-parallel size changes while a batch drains (PAT).

Whether and to which size a node switches is decided by the code of a live rollout
(`plexrl.rollout.policies.adaptive_tp`), each time responses end. `System.ends` says where it
expects them to end. A batch begins with the size of the setting; to return to that size costs a
switch without KV cache.
"""

from collections.abc import Sequence

from plexrl.errors import InvariantError
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.projection import DecodingRow, bound, project
from plexrl.rollout.policies.adaptive_tp.remaining import UnfinishedRow
from plexrl.rollout.trajectories.lengths import RECENT_MAX
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.setting import Ends, System
from plexrl.sim.rollout.systems.dispatch import dispatch
from plexrl.sim.rollout.systems.pat.node import PatNode
from plexrl.sim.rollout.systems.pat.profile import decode_profile
from plexrl.sim.rollout.systems.synchronous import Synchronous
from plexrl.sim.rollout.world import Policy, World


class AdaptiveTpSystem(Synchronous):
    """Batches on nodes that switch."""

    def __init__(self, world: World, system: System) -> None:
        super().__init__(world, self._begin_batch)
        model = world.setting.model
        if model is None:
            raise InvariantError("adaptive tensor parallelism has no model")
        self._predictor = LatencyPredictor(decode_profile(world.setting, model))
        self._ends = system.ends
        self._recent: list[int] = []
        """Tokens of the latest trained responses, the latest one last."""
        self._batch: list[int] = []
        """Tokens of the complete responses of the present batch."""
        per_node = min(model.gpu.per_node, world.setting.gpus)
        self._nodes = [
            PatNode(world, self, model, self._predictor, self._unfinished)
            for _ in range(world.setting.gpus // per_node)
        ]

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        super().finished(trajectories)
        self._batch += [trajectory.response_tokens for trajectory in trajectories]
        if self._ends == Ends.PROJECTED and not self._recent:
            return
        ended = {trajectory.segments[-1].instance for trajectory in trajectories}
        for node in self._nodes:
            if ended & {instance.number for instance in node.instances}:
                node.consider()

    def trained(self) -> None:
        """See `Policy`. The engines return to the size of a whole batch."""
        world, costs = self._world, self._world.setting.costs
        self._recent = [*self._recent, *self._batch][-RECENT_MAX:]
        self._batch.clear()
        has_switched = any(instance.costs != costs for instance in world.instances)
        world.restart_instances(costs)
        switch_s = self._predictor.profile.switch_s if has_switched else 0.0
        world.at(world.now + switch_s, super().trained)

    def _unfinished(
        self, groups: Sequence[Sequence[SimulatedTrajectory]]
    ) -> list[list[UnfinishedRow]]:
        """The rows of groups with what they are expected to draw still."""
        if self._ends == Ends.KNOWN:
            return [
                [
                    UnfinishedRow(each.length, each.response_tokens - each.done_tokens)
                    for each in some
                ]
                for some in groups
            ]
        limit = self._world.setting.workload.limit
        rows = [
            [DecodingRow(each.length, each.done_tokens, limit) for each in some] for some in groups
        ]
        return project(rows, self._recent) if self._ends == Ends.PROJECTED else bound(rows)

    def _begin_batch(
        self, world: World, policy: Policy, trajectories: Sequence[SimulatedTrajectory]
    ) -> None:
        per_node = len(world.instances) // len(self._nodes)
        for at, node in enumerate(self._nodes):
            node.instances = world.instances[at * per_node : (at + 1) * per_node]
        dispatch(world, policy, trajectories)
