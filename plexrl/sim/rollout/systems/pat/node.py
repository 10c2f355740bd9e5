"""One node whose tensor-parallel groups change while it generates (PAT §4.1).

Each node decides for itself. All of its groups stop at the end of their steps, the KV cache moves
or is computed again, and the unfinished responses go on in groups of the new size.
"""

from collections.abc import Callable, Sequence
from itertools import count

from plexrl.latency.models import Model
from plexrl.rollout.policies.adaptive_tp.controller import SwitchController, TpSwitch
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.remaining import UnfinishedRow
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.world import Policy, World


class PatNode:
    """The groups of one node."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        model: Model,
        predictor: LatencyPredictor,
        unfinished: Callable[[Sequence[Sequence[SimulatedTrajectory]]], list[list[UnfinishedRow]]],
    ) -> None:
        """`unfinished`: groups of trajectories with what they are expected to draw still."""
        self._world = world
        self._policy = policy
        self._model = model
        self._predictor = predictor
        self._unfinished = unfinished
        self._controller = SwitchController(predictor)
        self._numbers = count(world.setting.gpus)
        self.instances: list[Instance] = []
        """Empty during a switch."""

    def consider(self) -> None:
        """Switch now if that pays."""
        world = self._world
        for instance in self.instances:
            instance.advance(world.now)
            world.touch(instance, self._policy)
        groups = self._unfinished(
            [[*instance.running(), *instance.waiting] for instance in self.instances]
        )
        if not any(groups):
            return
        switch = self._controller.decide(
            self.instances[0].costs.gpus, groups, first_tp=world.setting.costs.gpus
        )
        if switch is not None:
            self._begin(switch)

    def _begin(self, switch: TpSwitch) -> None:
        """Stop all groups. They go on when the last one has stopped and the switch is done."""
        world, old = self._world, self.instances
        running: list[SimulatedTrajectory] = []
        waiting: list[SimulatedTrajectory] = []
        largest = 0
        for each in old:
            stopped = each.interrupt_all(world.now)
            world.touch(each, self._policy)
            queued = [one for one in stopped if not one.holds_kv]
            kept = [one for one in stopped if one.holds_kv]
            largest = max(largest, sum(one.length for one in kept))
            waiting += queued
            running += kept
        tp, gpus = old[0].costs.gpus, sum(each.costs.gpus for each in old)
        ready_s = max(each.stopped_s for each in old) + self._predictor.profile.switch_s
        if switch.kv == "migrate":
            ready_s += self._predictor.move_s(tp, switch.tp, largest)
        else:
            waiting, running = [*running, *waiting], []
        new = [
            Instance(number, self._model.costs(switch.tp), version=old[0].version)
            for number, _ in zip(self._numbers, range(gpus // switch.tp), strict=False)
        ]
        world.replace_instances(old, new)
        self.instances = []
        world.at(ready_s, lambda: self._resume(new, running, waiting))

    def _resume(
        self,
        new: list[Instance],
        running: Sequence[SimulatedTrajectory],
        waiting: Sequence[SimulatedTrajectory],
    ) -> None:
        world, self.instances = self._world, new
        (rows,) = self._unfinished([running])
        left = {each.number: row.left for each, row in zip(running, rows, strict=True)}
        ordered = sorted(running, key=lambda e: (-left[e.number], -e.length, e.number))
        for at, instance in enumerate(new):
            instance.resume(ordered[at :: len(new)], world.now)
            instance.route(waiting[at :: len(new)], world.now)
            world.touch(instance, self._policy)
