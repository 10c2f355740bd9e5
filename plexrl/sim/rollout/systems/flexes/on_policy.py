"""Flexes' parts on the virtual clock: a rollout without staleness on the GPUs that train, too.

Tail batching and which GPUs are freed before a round is complete are the coordinator's, the size of
tensor-parallel groups is the planner's. At the end of a training step all engines load the new
parameters and begin the next round together.

The data set has as many prompts as the run trains, so that the last steps take what is queued.
"""

from collections.abc import Callable, Sequence

from plexrl.rollout.coordinator.messages import (
    Abort,
    BatchRequested,
    Generated,
    InstanceLost,
    Interrupt,
    ParametersPushed,
    PromptsEnded,
    Pull,
    ReportQueuedGroup,
    ReportScaleDown,
    Rewarded,
    RolloutCommand,
    Route,
    Train,
)
from plexrl.rollout.policies.parallelism import ParallelismPlanner
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId
from plexrl.sim.rollout.engine.rewards import Rewards
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.setting import System
from plexrl.sim.rollout.systems.coordinated import Coordinated, instance_name
from plexrl.sim.rollout.systems.flexes.streaming import StreamTrainer
from plexrl.sim.rollout.world import World

LOOKS = 100
"""Snapshots for as many samples as a batch has, so that GPUs are not freed late: the coordinator
looks at each 5 % of a round."""


class OnPolicy(Coordinated):
    """Rounds of rollout, rewards and training."""

    def __init__(self, world: World, system: System) -> None:
        super().__init__(world, system)
        setting = world.setting
        self._parts = system.active_parts
        self._rewards = Rewards(setting.rewards, setting.workload.seed)
        self._prompts = setting.steps * setting.batch_groups
        self._kind = ""
        """Kind of the present round: `short`, `long`, or empty."""
        self._graded: dict[int, list[SimulatedTrajectory]] = {}
        """Samples of the present round that have rewards, by prompt."""
        self._generated = 0
        """Samples since the run began."""
        self._look_at = 0.0
        """Such samples at the next snapshot for the stream trainer."""
        self._preemptions = 0
        """Preemptions of the present instances in earlier rounds."""
        longest = setting.workload.prompt_tokens + setting.workload.limit
        self._planner = None
        if self._parts.parallelism and setting.model is not None:
            sizes = [size for size in setting.model.sizes(longest) if not setting.gpus % size]
            profile = {size: setting.model.costs(size).step_s(1, 0) for size in sizes}
            self._planner = ParallelismPlanner(sizes, setting.costs.gpus, profile=profile)
        self._stream = StreamTrainer(setting.costs.train_gpu_s_per_token)

    def start(self) -> None:
        """See `Policy`."""
        self._kind = self._core.rounds.kind or ""
        super().start()

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        for trajectory in trajectories:
            name = instance_name(trajectory.segments[-1].instance)
            number = TrajectoryId(trajectory.number)
            self._tell(Generated(trajectory=number, instance=name, segments=self._new(trajectory)))
            if not self._is_present(trajectory):
                continue
            if self._parts.rewards:
                at_s = self._world.now + self._rewards.seconds(trajectory.group)
                self._world.at(at_s, lambda done=trajectory: self._rewarded(done))  # type: ignore[misc]
            else:
                self._rewarded(trajectory)
            self._generated += 1
        if self._parts.stream and self._generated >= self._look_at:
            self._look_at = self._generated + self._world.setting.batch_trajectories / LOOKS
            self._take_snapshot()

    def trained(self) -> None:
        """See `Policy`."""
        world = self._world
        self._tell(ParametersPushed(version=world.version))
        for name in list(self._instances):
            self._leave(name)
        for instance in world.instances:
            # What is left was aborted.
            instance.interrupt_all(world.now)
            instance.finished.clear()
        self._kind = self._core.rounds.kind or ""
        if self._planner is not None:
            self._set_size(self._planner.size(self._kind))
        ready_s = max(instance.pull(world.version, world.now) for instance in world.instances)
        world.at(ready_s, self._begin)
        self._tell(BatchRequested())

    def _begin(self) -> None:
        """All engines are ready for the next round."""
        for instance in self._world.instances:
            self._join(instance)
        self._take_snapshot()

    def _set_size(self, gpus: int) -> None:
        world = self._world
        if world.setting.model is not None and gpus != world.instances[0].costs.gpus:
            world.restart_instances(world.setting.model.costs(gpus))
            self._preemptions = 0

    def _leave(self, name: InstanceId) -> None:
        del self._instances[name]
        self._tell(InstanceLost(instance=name))

    def _is_present(self, trajectory: SimulatedTrajectory) -> bool:
        """Whether it was not aborted with its prompt, and its prompt is not trained."""
        return self._trajectories.get(trajectory.number) is trajectory

    def _rewarded(self, trajectory: SimulatedTrajectory) -> None:
        if not self._is_present(trajectory):
            return
        graded = self._graded.setdefault(trajectory.group, [])
        graded.append(trajectory)
        if len(graded) == self._world.setting.workload.group_size:
            tokens = sum(each.length for each in graded)
            self._stream.complete(tokens, self._world.now)
        self._tell(Rewarded(trajectory=TrajectoryId(trajectory.number), reward=0.0))

    def _issue(self, commands: Sequence[RolloutCommand]) -> None:
        freed: tuple[InstanceId, ...] = ()
        for command in commands:
            if isinstance(command, ReportQueuedGroup):
                self._graded.pop(command.group, None)
                self._draw(command.group)
            elif isinstance(command, ReportScaleDown):
                freed = command.freed
        reports = (ReportQueuedGroup, ReportScaleDown)
        super()._issue([command for command in commands if not isinstance(command, reports)])
        if freed:
            world = self._world
            world.at(world.now + world.setting.command_s, self._in_round(lambda: self._free(freed)))

    def _send(self, commands: Sequence[RolloutCommand]) -> None:
        """Commands of a round do not reach engines in the next."""
        world, routed = self._world, self._routed(commands)

        def arrive() -> None:
            here = [command for command in commands if target(command) in self._instances]
            self._execute(here, routed)

        world.at(world.now + world.setting.command_s, self._in_round(arrive))

    def _in_round(self, action: Callable[[], None]) -> Callable[[], None]:
        """The action, or nothing if the present step has ended by then."""
        world, version = self._world, self._world.version
        return lambda: action() if world.version == version else None

    def _free(self, names: Sequence[InstanceId]) -> None:
        """Let instances that were told to stop train once they have stopped and hold the state of
        training."""
        world = self._world
        freed = [self._instances[name] for name in names]
        gpus = sum(each.costs.gpus for each in freed)
        stopped_s = max(max(each.stopped_s for each in freed), world.now)
        world.at(stopped_s, self._in_round(self._take_snapshot))
        world.at(
            stopped_s + world.setting.costs.pull_s,
            self._in_round(lambda: self._train_early(gpus)),
        )

    def _train_early(self, gpus: int) -> None:
        if not self._world.is_training:
            self._stream.free(gpus, self._world.now)

    def _train(self, command: Train) -> None:
        world = self._world
        groups = {each.group for each in command.batch}
        batch = [self._trajectories[each.trajectory] for each in command.batch]
        ids = self._core.settings.staleness.ids_per_group
        for group in groups:
            for number in range(group * ids, (group + 1) * ids):
                self._trajectories.pop(number, None)
        reward_s = 0.0 if self._parts.rewards else self._rewards.stage_s(groups)
        done_tokens = self._stream.end(world.now)
        kind = self._kind
        world.at(
            world.now + reward_s,
            lambda: world.train(
                batch, self, round_kind=kind, reward_s=reward_s, done_tokens=done_tokens
            ),
        )
        self._end_round()
        self._add_groups()

    def _end_round(self) -> None:
        self._graded.clear()
        preemptions = sum(instance.preemptions for instance in self._world.instances)
        if self._planner is not None:
            self._planner.observe(self._kind, preemptions - self._preemptions)
        self._preemptions = preemptions

    def _add_groups(self) -> None:
        self._add(min(self._core.groups_wanted, self._prompts - self._next_group))
        if self._next_group == self._prompts:
            self._tell(PromptsEnded())


def target(command: RolloutCommand) -> InstanceId | None:
    """The instance that carries out a command."""
    return command.instance if isinstance(command, Route | Interrupt | Abort | Pull) else None
