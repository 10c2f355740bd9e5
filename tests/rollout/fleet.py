"""Instances, reward server and trainer in memory, one small action at a time.

Each instance has a queue of commands to run and a queue of events on their way to the coordinator,
so that a test can let messages cross each other in any order that the protocol allows.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    Abort,
    BatchRequested,
    Generated,
    GenerationFailed,
    GroupAdded,
    InstanceJoined,
    InstanceLost,
    InstancesChosen,
    Interrupt,
    ParametersPushed,
    PromptsEnded,
    Pull,
    Pulled,
    ReportDroppedGroup,
    ReportQueuedGroup,
    Rewarded,
    RolloutCommand,
    RolloutEvent,
    Route,
    SnapshotTaken,
    Stopped,
    StoppedTrajectory,
    SwitchTp,
    TpSwitched,
    Train,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    TrajectorySegment,
    TrajectoryState,
    trajectory_ids,
)

PROMPT = 3


@dataclass
class Engine:
    """One rollout instance: a KV cache in tokens and first-come-first-served admission."""

    name: InstanceId
    version: int
    budget: int
    to_run: deque[RolloutCommand] = field(default_factory=deque)
    sent: deque[RolloutEvent] = field(default_factory=deque)
    held: dict[TrajectoryId, int] = field(default_factory=dict)
    """New tokens of each trajectory, in the order of arrival."""
    before: dict[TrajectoryId, int] = field(default_factory=dict)
    """Length of each trajectory when it arrived."""
    completed: int = 0
    tp: int = 1
    """Ranks of its groups."""

    def length(self, each: TrajectoryId) -> int:
        return self.before[each] + self.held[each]

    def running(self) -> list[TrajectoryId]:
        used, found = 0, list[TrajectoryId]()
        for each in self.held:
            used += self.length(each) + 1
            if used > self.budget and found:
                break
            found.append(each)
        return found

    def segments(self, each: TrajectoryId) -> tuple[TrajectorySegment, ...]:
        tokens = self.held[each]
        if not tokens:
            return ()
        return (
            TrajectorySegment(tokens=tokens, policy_version=self.version, kv_version=self.version),
        )

    def drop(self, each: TrajectoryId) -> None:
        del self.held[each], self.before[each]

    def snapshot(self, *, serves: bool) -> InstanceSnapshot:
        running = self.running()
        waiting = [each for each in self.held if each not in running]
        return InstanceSnapshot(
            instance=self.name,
            version=self.version,
            kv_cache=sum(map(self.length, running)),
            running=tuple(running),
            running_tokens=tuple(map(self.length, running)),
            waiting=tuple(waiting),
            waiting_tokens=tuple(map(self.length, waiting)),
            completed=self.completed,
            serves=serves,
            tp=self.tp,
            # It has four ranks.
            groups=tuple(index % (4 // self.tp) for index in range(len(running))),
        )


class Fleet:
    """The coordinator with everything that surrounds it."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        """Those with which it began."""
        self.core = RolloutCoordinator(settings)
        self.engines: dict[InstanceId, Engine] = {}
        self.lengths: dict[TrajectoryId, int] = {}
        """Response length of each trajectory; set before it can complete."""
        self.to_reward: list[TrajectoryId] = []
        self.log: list[tuple[RolloutEvent, list[RolloutCommand]]] = []
        """Every event that was handled, with its commands."""
        self.late: list[RolloutEvent] = []
        """Events of lost instances, still on their way."""
        self.drained: set[InstanceId] = set()
        """Instances that were told to return what they have, since they joined."""
        self.lost: list[InstanceId] = []
        """Names of instances that ended."""
        self.tokens: dict[TrajectoryId, int] = {}
        """Response tokens that instances have returned."""
        self.failures: dict[TrajectoryId, int] = {}
        self.training: Train | None = None
        self.is_asked = False
        """The trainer waits for a batch."""
        self.pushed = settings.staleness.first_version
        self.trained: list[Train] = []
        self.bounds: list[int] = []
        """The staleness bound of each trained batch."""
        self.dropped: list[SampleGroupId] = []
        self.equal_rewards: set[int] = set()
        """Groups whose samples all get the same reward."""
        self.prompts: int | None = None
        """Prompts of the data set; None: it has no end."""
        self._joined = 0
        self.groups_added = 0

    def handle(self, event: RolloutEvent) -> None:
        commands = self.core.handle(event)
        self.log.append((event, commands))
        for command in commands:
            match command:
                case Train():
                    assert self.is_asked
                    self.training, self.is_asked = command, False
                    self.trained.append(command)
                    self.bounds.append(self.core.settings.staleness.staleness)
                case ReportDroppedGroup():
                    self.dropped.append(command.group)
                case ReportQueuedGroup():
                    self._forget(command.group)
                case Pull() | Route() | Interrupt() | Abort():
                    self.engines[command.instance].to_run.append(command)
                case SwitchTp():
                    self._add_switch(self.engines[command.instance], command)

    def _add_switch(self, engine: Engine, command: SwitchTp) -> None:
        answered = not any(isinstance(each, SwitchTp) for each in engine.to_run)
        assert answered, "one switch at a time"
        assert not any(isinstance(each, TpSwitched) for each in engine.sent)
        assert command.gain_s > 0
        engine.to_run.append(command)

    def _forget(self, group: SampleGroupId) -> None:
        """Nothing of the group's samples is kept."""
        ids = trajectory_ids(group, self.core.settings.staleness.ids_per_group)
        self.to_reward = [each for each in self.to_reward if each not in ids]
        for each in ids:
            self.tokens.pop(each, None)
            self.failures.pop(each, None)

    def _is_kept(self, trajectory: TrajectoryId, instance: InstanceId) -> bool:
        """Whether the instance has the trajectory, and not to discard it."""
        record = self.core.trajectories.get(trajectory)
        return (
            record is not None
            and record.instance == instance
            and record.state is not TrajectoryState.ABORTING
        )

    def join(self, budget: int, name: InstanceId | None = None) -> None:
        """An instance joins, or comes back under the name that it had."""
        if name is None:
            name = InstanceId(f"i{self._joined:03d}")
            self._joined += 1
        self.late = [each for each in self.late if getattr(each, "instance", None) != name]
        self.engines[name] = Engine(name, self.core.newest_version, budget)
        event = InstanceJoined(instance=name, version=self.core.newest_version, kv_budget=budget)
        self.handle(event)

    def drain(self, name: InstanceId, left: Sequence[InstanceId]) -> None:
        self.drained.add(name)
        others = tuple(each for each in left if each != name)
        event = InstancesChosen(deployments=others, ending=(name,), drained=(name,), reason="test")
        self.handle(event)

    def has(self, name: InstanceId) -> bool:
        """Whether the instance has a trajectory, or is to get one."""
        engine = self.engines[name]
        return bool(engine.held) or any(isinstance(each, Route) for each in engine.to_run)

    def kill(self, name: InstanceId) -> None:
        self.drained.discard(name)
        self.late += self.engines.pop(name).sent
        self.lost.append(name)
        self.handle(InstanceLost(instance=name))

    def add_groups(self) -> None:
        while self.core.groups_wanted and self.groups_added != self.prompts:
            group = SampleGroupId(self.groups_added)
            # Some prompts have no expected length; it is used by `length-aware` only.
            expected = group * 5 % 7
            self.handle(GroupAdded(group=group, prompt_tokens=PROMPT, expected_tokens=expected))
            self.groups_added += 1
        if self.groups_added == self.prompts and not self.core.rounds.held.is_ended:
            self.handle(PromptsEnded())

    def run_command(self, engine: Engine) -> None:
        """The engine runs the oldest command that it has not run."""
        match command := engine.to_run.popleft():
            case Pull():
                assert not engine.held, "a pull follows the interrupt of all trajectories"
                engine.version = self.core.newest_version
                engine.completed = 0
                engine.sent.append(Pulled(instance=engine.name, version=engine.version))
            case SwitchTp():
                has_switched = engine.tp != command.tp
                engine.tp = command.tp
                switched = TpSwitched(instance=engine.name, has_switched=has_switched)
                engine.sent.append(switched)
            case Route():
                engine.tp = engine.tp if engine.held else 1
                for each in command.trajectories:
                    record = self.core.trajectories.get(each)
                    tokens = self.tokens.get(each, 0)
                    # An abort may be on its way to the engine.
                    if record is not None and record.state is not TrajectoryState.ABORTING:
                        assert record.length == PROMPT + tokens
                    engine.before[each] = PROMPT + tokens
                    engine.held[each] = 0
            case Interrupt() | Abort():
                found = [each for each in command.trajectories if each in engine.held]
                stopped = tuple(
                    StoppedTrajectory(trajectory=each, segments=engine.segments(each))
                    for each in found
                )
                for each in found:
                    engine.drop(each)
                engine.sent.append(Stopped(instance=engine.name, trajectories=stopped))

    def decode(self, engine: Engine, tokens: int = 1) -> None:
        """So many tokens for each running trajectory, or as many as it lacks."""
        for each in engine.running():
            left = self.lengths.get(each, 4) - (engine.length(each) - PROMPT)
            engine.held[each] += min(tokens, left)
            if left <= tokens:
                event = Generated(
                    trajectory=each, instance=engine.name, segments=engine.segments(each)
                )
                engine.drop(each)
                engine.completed += 1
                engine.sent.append(event)

    def fail(self, engine: Engine, each: TrajectoryId) -> None:
        """The engine cannot go on with a trajectory."""
        engine.drop(each)
        engine.sent.append(
            GenerationFailed(trajectory=each, instance=engine.name, reason="out of memory")
        )

    def deliver(self, engine: Engine) -> None:
        """The oldest event of the engine arrives."""
        match event := engine.sent.popleft():
            case Generated():
                self.handle(event)
                record = self.core.trajectories.get(event.trajectory)
                if record is not None and record.state is TrajectoryState.GENERATED:
                    self.to_reward.append(event.trajectory)
            case GenerationFailed():
                if self._is_kept(event.trajectory, engine.name):
                    self.failures[event.trajectory] = self.failures.get(event.trajectory, 0) + 1
                self.handle(event)
            case Stopped():
                kept = [e for e in event.trajectories if self._is_kept(e.trajectory, engine.name)]
                for each in kept:
                    new = sum(segment.tokens for segment in each.segments)
                    self.tokens[each.trajectory] = self.tokens.get(each.trajectory, 0) + new
                self.handle(event)
            case _:
                self.handle(event)

    def snapshot(self, silent: Engine | None = None) -> None:
        """All engines are seen at once. `silent` does not answer, but its load is known."""
        shown = (each.snapshot(serves=each is not silent) for each in self.engines.values())
        self.handle(SnapshotTaken(instances=tuple(shown)))

    def reward(self, index: int) -> None:
        each = self.to_reward.pop(index)
        self.handle(Rewarded(trajectory=each, reward=self.reward_of(each)))

    def reward_of(self, each: TrajectoryId) -> float:
        """The reward of a trajectory; all of a group differ, unless they are to be equal."""
        ids = self.core.settings.staleness.ids_per_group
        return 0.5 if each // ids in self.equal_rewards else float(each % ids)

    def ask_for_batch(self) -> None:
        if self.training is None and not self.is_asked:
            self.is_asked = True
            self.handle(BatchRequested())

    def finish_training(self) -> None:
        """The trainer ends its step and pushes the parameters."""
        assert self.training is not None
        self.pushed = self.training.version + 1
        self.training = None
        self.handle(ParametersPushed(version=self.pushed))

    def restart(self) -> None:
        """The coordinator ends, and another one goes on from its state."""
        state = msgspec.json.decode(msgspec.json.encode(self.core.state()), type=dict[str, object])
        self.core = RolloutCoordinator.restore(self.core.settings, state)

    def round(self, tokens: int = 1) -> None:
        """Everything happens once: a fair schedule."""
        self.add_groups()
        self.ask_for_batch()
        for engine in list(self.engines.values()):
            while engine.to_run:
                self.run_command(engine)
            self.decode(engine, tokens)
            while engine.sent:
                self.deliver(engine)
        while self.to_reward:
            self.reward(0)
        if self.training is not None:
            self.finish_training()
        self.snapshot()
