"""PlexRL's rollout coordinator on the virtual clock.

The coordinator is the one that a live service runs (`plexrl.rollout.coordinator`). This module
turns its commands into what simulated instances do, and what they do into its events. Rewards are
computed at once. New parameters reach the parameter server `push_s` after their training step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import thread_time
from typing import cast

from plexrl.client.data.rollout_policy import (
    BoundedStaleness,
    RolloutPolicy,
    TailBatching,
    policy_fields,
)
from plexrl.errors import InvariantError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    Abort,
    BatchRequested,
    Generated,
    GroupAdded,
    InstanceJoined,
    Interrupt,
    ParametersPushed,
    Pull,
    Pulled,
    Rewarded,
    RolloutCommand,
    RolloutEvent,
    Route,
    SnapshotTaken,
    Stopped,
    StoppedTrajectory,
    Train,
)
from plexrl.rollout.coordinator.policy_settings import coordinator_settings
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    TrajectorySegment,
)
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.setting import COORDINATED, RANKED, Setting, System
from plexrl.sim.rollout.systems.ranks import ExpectedLengths
from plexrl.sim.rollout.world import World


class Coordinated:
    """Instances, trainer and parameter server as the coordinator sees them."""

    def __init__(self, world: World, system: System) -> None:
        self._world = world
        self._core = RolloutCoordinator(_settings(world.setting, system))
        self._instances: dict[InstanceId, Instance] = {}
        """Instances that have joined."""
        self._trajectories: dict[int, SimulatedTrajectory] = {}
        """Trajectories that are not trained yet."""
        self._next_group = 0
        self._expected = (
            ExpectedLengths(world.setting.workload, world.setting.batch_groups, system.recall)
            if system.name in RANKED
            else None
        )

    def start(self) -> None:
        """See `Policy`."""
        for instance in self._world.instances:
            self._join(instance)
        self._add_groups()
        self._tell(BatchRequested())
        self._cycle()

    def finished(self, trajectories: Sequence[SimulatedTrajectory]) -> None:
        """See `Policy`."""
        for trajectory in trajectories:
            number = TrajectoryId(trajectory.number)
            name = instance_name(trajectory.segments[-1].instance)
            self._tell(Generated(trajectory=number, instance=name, segments=self._new(trajectory)))
            self._tell(Rewarded(trajectory=number, reward=0.0))

    def trained(self) -> None:
        """See `Policy`."""
        world = self._world
        version = world.version
        world.at(
            world.now + world.setting.costs.push_s,
            lambda: self._tell(ParametersPushed(version=version)),
        )
        self._tell(BatchRequested())

    def _join(self, instance: Instance) -> None:
        name = instance_name(instance.number)
        self._instances[name] = instance
        self._tell(
            InstanceJoined(
                instance=name,
                version=instance.version,
                kv_budget=float(instance.costs.kv_tokens),
                gpus=instance.costs.gpus,
            )
        )

    def _cycle(self) -> None:
        """Take snapshots from now on."""
        self._take_snapshot()
        self._world.at(self._world.now + self._world.setting.cycle_s, self._cycle)

    def _take_snapshot(self) -> None:
        """Take a snapshot and carry out what follows."""
        world = self._world
        for each in self._instances.values():
            each.advance(world.now)
            world.touch(each, self)
        snapshot = SnapshotTaken(
            instances=tuple(_snapshot(name, each) for name, each in self._instances.items())
        )
        used = self._core.snapshots_used
        began = thread_time()
        commands = self._core.handle(snapshot)
        if self._core.snapshots_used > used:
            world.recorder.decide_s.append(thread_time() - began)
        self._issue(commands)

    def _tell(self, event: RolloutEvent) -> None:
        self._issue(self._core.handle(event))

    def _issue(self, commands: Sequence[RolloutCommand]) -> None:
        """Training begins at once. Instances get their commands `command_s` later: all of them, so
        that each runs them in the order of issue, as the protocol wants."""
        remote = []
        for command in commands:
            if isinstance(command, Train):
                self._train(command)
            else:
                remote.append(command)
        if remote:
            self._send(remote)

    def _send(self, commands: Sequence[RolloutCommand]) -> None:
        world, routed = self._world, self._routed(commands)
        world.at(world.now + world.setting.command_s, lambda: self._execute(commands, routed))

    def _routed(self, commands: Sequence[RolloutCommand]) -> dict[int, SimulatedTrajectory]:
        """The trajectories that commands send to instances, by number."""
        numbers = (
            trajectory
            for route in commands
            if isinstance(route, Route)
            for trajectory in route.trajectories
        )
        return {number: self._trajectories[number] for number in numbers}

    def _execute(
        self, commands: Sequence[RolloutCommand], routed: Mapping[int, SimulatedTrajectory]
    ) -> None:
        for command in commands:
            match command:
                case Route():
                    instance = self._instances[command.instance]
                    instance.route(
                        [routed[trajectory] for trajectory in command.trajectories], self._world.now
                    )
                    self._world.touch(instance, self)
                case Interrupt() | Abort():
                    self._interrupt(command)
                case Pull():
                    instance = self._instances[command.instance]
                    end_s = instance.pull(command.version, self._world.now)
                    pulled = Pulled(instance=command.instance, version=command.version)
                    self._world.at(end_s, lambda told=pulled: self._tell(told))  # type: ignore[misc]
                case _:
                    raise InvariantError(f"the coordinator says {command} in a run without faults")

    def _train(self, command: Train) -> None:
        batch = [self._trajectories.pop(each.trajectory) for each in command.batch]
        self._world.train(batch, self)
        self._add_groups()

    def _interrupt(self, command: Interrupt | Abort) -> None:
        instance = self._instances[command.instance]
        removed = instance.interrupt(command.trajectories, self._world.now)
        # What ended in the last step is reported before the answer, as the protocol wants.
        self._world.touch(instance, self)
        answer = Stopped(
            instance=command.instance,
            trajectories=tuple(
                StoppedTrajectory(trajectory=TrajectoryId(each.number), segments=self._new(each))
                for each in removed
            ),
        )
        self._world.at(instance.stopped_s, lambda: self._tell(answer))

    def _add_groups(self) -> None:
        """Fill the trajectory server with prompts."""
        self._add(self._core.groups_wanted)

    def _add(self, count: int) -> None:
        """Add the next prompts, with expected lengths if the system has ranks."""
        first, self._next_group = self._next_group, self._next_group + count
        drawn = [self._draw(group) for group in range(first, first + count)]
        expected = [0] * count if self._expected is None else self._expected(drawn)
        for at, members in enumerate(drawn):
            self._tell(
                GroupAdded(
                    group=SampleGroupId(first + at),
                    prompt_tokens=members[0].prompt_tokens,
                    expected_tokens=expected[at],
                )
            )

    def _draw(self, group: int) -> list[SimulatedTrajectory]:
        """New trajectories for a prompt."""
        members = self._world.prompts.group(group, self._core.settings.staleness.extra_samples)
        self._trajectories |= {member.number: member for member in members}
        return members

    def _new(self, trajectory: SimulatedTrajectory) -> tuple[TrajectorySegment, ...]:
        """Segments that the coordinator does not know yet. A KV cache is always of one version."""
        known = trajectory.reported
        trajectory.reported = len(trajectory.segments)
        return tuple(
            TrajectorySegment(
                tokens=segment.tokens, policy_version=segment.version, kv_version=segment.version
            )
            for segment in trajectory.segments[known:]
        )


def _settings(setting: Setting, system: System) -> CoordinatorSettings:
    costs, strategies = setting.costs, system.strategies
    settings = coordinator_settings(
        policy_fields(policy_of(system)),
        batch_groups=setting.batch_groups,
        group_size=setting.workload.group_size,
        response_tokens_max=setting.workload.limit,
        cost_model=CostModel(k1=costs.k1, k2=costs.k2, k3=costs.k3, k4=costs.k4, k5=1.0),
    )
    return replace(
        settings,
        routing=settings.routing if strategies.routing else "count",
        synchronisation="throughput" if strategies.synchronization else "greedy",
        migration="throughput" if strategies.migration else "none",
    )


def policy_of(system: System) -> RolloutPolicy:
    """The policy that a live rollout has for what the system does, but for the profile of `pat`."""
    if system.name not in COORDINATED:
        return BoundedStaleness(system.staleness, length_aware=system.name in RANKED)
    parts = system.active_parts
    prompts, responses = system.over_launch_prompts, system.over_launch_responses
    if not parts.tail:
        prompts = responses = 1.0
    is_fixed = system.fixed_over_launch
    if prompts == responses:
        return TailBatching(
            over_launch=prompts, fixed_over_launch=is_fixed, scale_down=parts.stream
        )
    return TailBatching(
        over_launch_prompts=prompts,
        over_launch_responses=responses,
        fixed_over_launch=is_fixed,
        scale_down=parts.stream,
    )


def instance_name(number: int) -> InstanceId:
    """The id of an instance for the coordinator."""
    return InstanceId(f"i{number:04d}")


def _snapshot(name: InstanceId, instance: Instance) -> InstanceSnapshot:
    running, lengths = instance.batch()
    return InstanceSnapshot(
        instance=name,
        version=instance.version,
        kv_cache=float(instance.kv),
        running=cast("tuple[TrajectoryId, ...]", running),
        running_tokens=lengths,
        waiting=tuple(TrajectoryId(each.number) for each in instance.waiting),
        waiting_tokens=tuple(each.length for each in instance.waiting),
        completed=instance.completed,
    )
