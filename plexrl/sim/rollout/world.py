"""The virtual clock of a run: instances, the trainer, and what happens when."""

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from plexrl.errors import InvariantError
from plexrl.latency.costs import EngineCosts
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.results.recorder import Recorder
from plexrl.sim.rollout.setting import ON_POLICY, Setting, System
from plexrl.sim.rollout.workload import Prompts

QUIET_EVENTS_MAX = 5_000_000
"""Most events between two training steps; more are a system that does not progress."""


class Policy(Protocol):
    """The decisions of a system."""

    def start(self) -> None:
        """Begin at time 0."""
        ...

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """Record that trajectories ended at `world.now`."""
        ...

    def trained(self) -> None:
        """The training step ended at `world.now`; `world.version` is the new version."""
        ...


class World:
    """Instances, trainer and events of a run. Policies call its methods."""

    def __init__(self, setting: Setting, system: System, recorder: Recorder) -> None:
        costs = setting.costs
        self._is_colocated = system.name in ON_POLICY
        rollout = setting.gpus if self._is_colocated else system.rollout_gpus
        self.setting = setting
        self.prompts = Prompts(setting.workload)
        self.recorder = recorder
        self.now = 0.0
        self.version = 0
        """Version of the trained parameters: the number of finished training steps."""
        self.instances = [Instance(number, costs) for number in range(rollout // costs.gpus)]
        self.train_gpus = setting.gpus if self._is_colocated else setting.gpus - rollout
        self.is_training = False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._due: dict[Instance, float] = {}
        """Time of the pending event of each instance."""

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Call `action` at `time_s`; equal times in the order of the calls."""
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._count, action))

    def touch(self, instance: Instance, policy: Policy) -> None:
        """Report what ended on the instance, and wait for its next event."""
        if instance.finished:
            ended = instance.finished
            instance.finished = []
            by_time: dict[float, list[SimulatedTrajectory]] = {}
            for each in ended:
                assert each.finished_s is not None
                by_time.setdefault(each.finished_s, []).append(each)
            for time_s, trajectories in by_time.items():
                self.at(time_s, lambda done=trajectories: policy.finished(done))  # type: ignore[misc]
        due = instance.next_event_s()
        if due is None:
            self._due.pop(instance, None)
        elif self._due.get(instance) != due:
            self._due[instance] = due
            self.at(due, lambda: self._advance(instance, due, policy))

    def restart_instances(self, costs: EngineCosts) -> None:
        """Replace all instances, which are idle, by others of these costs on the same GPUs."""
        gpus = sum(instance.costs.gpus for instance in self.instances)
        new = [Instance(number, costs) for number in range(gpus // costs.gpus)]
        self.replace_instances(list(self.instances), new)

    def replace_instances(self, old: Sequence[Instance], new: Sequence[Instance]) -> None:
        """Put others in the place of some instances, which are empty."""
        self.recorder.instances_ended(old)
        for each in old:
            self._due.pop(each, None)
        self.instances = [*(instance for instance in self.instances if instance not in old), *new]

    def train(
        self,
        trajectories: Sequence[SimulatedTrajectory],
        policy: Policy,
        *,
        round_kind: str = "",
        reward_s: float = 0.0,
        done_tokens: float = 0.0,
    ) -> None:
        """Train one batch now, as version `self.version`. For `reward_s` before this only its
        rewards were computed; of its tokens so many are trained already."""
        if self.is_training:
            raise InvariantError("a training step begins before the last one has ended")
        self.is_training = True
        tokens = sum(trajectory.length for trajectory in trajectories)
        left_s = self.setting.costs.train_s(tokens - done_tokens, self.train_gpus)
        whole_s = self.setting.costs.train_s(tokens, self.train_gpus)
        end_s = self.now + left_s
        self.recorder.trained(
            self.version,
            self.now,
            end_s,
            trajectories,
            round_kind=round_kind,
            reward_s=reward_s,
            # GPUs that roll out, too, are not those of the trainer.
            early_s=0.0 if self._is_colocated else whole_s - left_s,
        )
        self.at(end_s, lambda: self._trained(policy))

    def run(self, policy: Policy) -> None:
        """Run until the last training step has ended.

        Raises:
            InvariantError: nothing is left to happen before that.
        """
        policy.start()
        if self.recorder.lanes_from is not None:
            self._sample()
        quiet = 0
        while self.version < self.setting.steps:
            if not self._events or quiet > QUIET_EVENTS_MAX:
                running = sum(instance.running_count for instance in self.instances)
                waiting = sum(len(instance.waiting) for instance in self.instances)
                raise InvariantError(
                    f"training step {self.version} never begins: {running} trajectories run, "
                    f"{waiting} wait"
                )
            before = self.version
            self.now, _, action = heapq.heappop(self._events)
            action()
            quiet += 1
            if self.version != before:
                quiet = 0
        self.recorder.instances_ended(self.instances)
        self.recorder.ended(self.now, self.instances, self.train_gpus)

    def _sample(self) -> None:
        self.recorder.sample(self.now, self.instances)
        self.at(self.now + self.recorder.sample_s, self._sample)

    def _advance(self, instance: Instance, due: float, policy: Policy) -> None:
        if self._due.get(instance) != due:
            return
        del self._due[instance]
        instance.advance(self.now)
        self.touch(instance, policy)

    def _trained(self, policy: Policy) -> None:
        self.is_training = False
        self.version += 1
        policy.trained()
