"""PlexRL's rollout coordinator on the virtual clock.

The coordinator is the one that a live service runs (`plexrl.rollout.coordinator`). This module
turns its commands into what simulated instances do, and what they do into its events. Rewards are
computed at once. New parameters reach the parameter server `push_s` after their training step.
"""

from collections.abc import Sequence
from time import thread_time
from typing import cast

from plexrl.errors import InvariantError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.cost_model import CostModel
from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    Command,
    Event,
    Generated,
    GroupAdded,
    InstanceJoined,
    Interrupt,
    ParametersPushed,
    Pull,
    Pulled,
    Rewarded,
    Route,
    SnapshotTaken,
    Stopped,
    StoppedTrajectory,
    Train,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.snapshot import InstanceSnapshot
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import InstanceId, SampleGroupId, Segment, TrajectoryId
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import Trajectory
from plexrl.sim.rollout.setting import Setting, System
from plexrl.sim.rollout.world import World


class StaleFlow:
    """Instances, trainer and parameter server as the coordinator sees them."""

    def __init__(self, world: World, system: System) -> None:
        self._world = world
        self._core = RolloutCoordinator(_settings(world.setting, system))
        self._instances = {_name(each): each for each in world.instances}
        self._trajectories: dict[int, Trajectory] = {}
        """All that are not trained yet."""
        self._reported: dict[int, int] = {}
        """Number of segments of a trajectory that the coordinator knows."""
        self._next_group = 0

    def start(self) -> None:
        """See `Policy`."""
        for name in self._instances:
            kv = float(self._world.setting.costs.kv_tokens)
            self._tell(InstanceJoined(instance=name, version=0, kv_budget=kv))
        self._add_groups()
        self._tell(BatchRequested())
        self._cycle()

    def finished(self, trajectories: Sequence[Trajectory]) -> None:
        """See `Policy`."""
        for each in trajectories:
            number = TrajectoryId(each.number)
            name = _name(self._world.instances[each.segments[-1].instance])
            self._tell(Generated(trajectory=number, instance=name, segments=self._new(each)))
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

    def _cycle(self) -> None:
        """Take a snapshot and carry out what follows."""
        world = self._world
        for each in world.instances:
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
        world.at(world.now + world.setting.cycle_s, self._cycle)

    def _tell(self, event: Event) -> None:
        self._issue(self._core.handle(event))

    def _issue(self, commands: Sequence[Command]) -> None:
        """Training begins at once. Instances get their commands `command_s` later: all of them, so
        that each runs them in the order of issue, as the protocol wants."""
        world = self._world
        remote = []
        for command in commands:
            if isinstance(command, Train):
                self._train(command)
            else:
                remote.append(command)
        if remote:
            world.at(world.now + world.setting.command_s, lambda: self._execute(remote))

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Route():
                    instance = self._instances[command.instance]
                    routed = [self._trajectories[each] for each in command.trajectories]
                    instance.route(routed, self._world.now)
                    self._world.touch(instance, self)
                case Interrupt():
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
        for each in batch:
            del self._reported[each.number]
        self._world.train(batch, self)
        self._add_groups()

    def _interrupt(self, command: Interrupt) -> None:
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
        for _ in range(self._core.groups_wanted):
            members = self._world.prompts.group(self._next_group)
            for each in members:
                self._trajectories[each.number] = each
                self._reported[each.number] = 0
            self._tell(
                GroupAdded(
                    group=SampleGroupId(self._next_group), prompt_tokens=members[0].prompt_tokens
                )
            )
            self._next_group += 1

    def _new(self, trajectory: Trajectory) -> tuple[Segment, ...]:
        """Segments that the coordinator does not know yet. A KV cache is always of one version."""
        known = self._reported[trajectory.number]
        self._reported[trajectory.number] = len(trajectory.segments)
        return tuple(
            Segment(tokens=each.tokens, policy_version=each.version, kv_version=each.version)
            for each in trajectory.segments[known:]
        )


def _settings(setting: Setting, system: System) -> CoordinatorSettings:
    costs, strategies = setting.costs, system.strategies
    return CoordinatorSettings(
        staleness=StalenessSettings(
            staleness=system.staleness,
            batch_groups=setting.batch_groups,
            group_size=setting.workload.group_size,
        ),
        cost_model=CostModel(k1=costs.k1, k2=costs.k2, k3=costs.k3, k4=costs.k4, k5=1.0),
        routing="throughput" if strategies.routing else "count",
        synchronisation="throughput" if strategies.synchronization else "greedy",
        migration="throughput" if strategies.migration else "none",
    )


def _name(instance: Instance) -> InstanceId:
    return InstanceId(f"i{instance.number:04d}")


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
