"""The commands that each instance got, and its answers; a replay of the events gives the same."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from plexrl.rollout.coordinator.messages import (
    Abort,
    Generated,
    GenerationFailed,
    InstanceJoined,
    InstanceLost,
    Interrupt,
    Pull,
    Pulled,
    RolloutCommand,
    RolloutEvent,
    Route,
    Stopped,
    SwitchTp,
    TpSwitched,
)
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId

InstanceCommand = Route | Interrupt | Abort | Pull | SwitchTp


@dataclass(slots=True, kw_only=True)
class InstanceWork:
    """One instance."""

    version: int
    kv_budget: float
    """Tokens."""
    unanswered: deque[InstanceCommand] = field(default_factory=deque)
    """Commands from the first one on that is not answered; a `Route` needs no answer."""
    held: dict[TrajectoryId, int] = field(default_factory=dict)
    """Trajectories routed there that have not ended, with the number of their `Route`."""
    routes: dict[int, tuple[TrajectoryId, ...]] = field(default_factory=dict)
    """All trajectories of each `Route` of which some have not ended."""
    unended: dict[int, int] = field(default_factory=dict)
    """How many of each such `Route` have not ended."""
    routed: int = 0
    """`Route` commands so far: their numbers count from 1."""
    completed: int = 0
    """Trajectories completed since the last pull."""
    pulls: int = 0
    """Pulls answered so far."""

    @property
    def begun(self) -> int:
        """Number of the latest `Route` that does not wait for another command."""
        return self.routed - sum(isinstance(command, Route) for command in self.unanswered)

    def add(self, command: InstanceCommand) -> None:
        """The instance is told something."""
        if isinstance(command, Route):
            self.routed += 1
            self.routes[self.routed] = command.trajectories
            self.unended[self.routed] = len(command.trajectories)
            self.held.update(dict.fromkeys(command.trajectories, self.routed))
        self.unanswered.append(command)
        self._settle()

    def answered(self) -> None:
        """The oldest command is answered."""
        self.unanswered.popleft()
        self._settle()

    def ended(self, trajectory: TrajectoryId) -> bool:
        """A trajectory has ended there. False: it was not held."""
        number = self.held.pop(trajectory, None)
        if number is None:
            return False
        self.unended[number] -= 1
        if not self.unended[number]:
            del self.unended[number], self.routes[number]
        return True

    def _settle(self) -> None:
        while self.unanswered and isinstance(self.unanswered[0], Route):
            self.unanswered.popleft()


class Instances:
    """All instances of a rollout."""

    def __init__(self) -> None:
        self.work: dict[InstanceId, InstanceWork] = {}

    def note(
        self, event: RolloutEvent, commands: Iterable[RolloutCommand]
    ) -> list[InstanceCommand]:
        """Records an event and its commands; returns those for instances, in order."""
        self._note_event(event)
        found: list[InstanceCommand] = []
        for command in commands:
            if not isinstance(command, InstanceCommand):
                continue
            self.work[command.instance].add(command)
            found.append(command)
        return found

    def _note_event(self, event: RolloutEvent) -> None:
        if isinstance(event, InstanceJoined):
            self.work[event.instance] = InstanceWork(
                version=event.version, kv_budget=event.kv_budget
            )
        elif isinstance(event, InstanceLost):
            self.work.pop(event.instance, None)
        elif isinstance(event, Generated | GenerationFailed | Stopped | Pulled | TpSwitched):
            work = self.work.get(event.instance)
            if work is not None:  # otherwise it is lost
                _note_answer(work, event)


def _note_answer(
    work: InstanceWork, event: Generated | GenerationFailed | Stopped | Pulled | TpSwitched
) -> None:
    match event:
        case Generated():
            if work.ended(event.trajectory):
                work.completed += 1
        case GenerationFailed():
            work.ended(event.trajectory)
        case Stopped():
            for trajectory in event.trajectories:
                work.ended(trajectory.trajectory)
            work.answered()
        case Pulled():
            work.version, work.completed = event.version, 0
            work.pulls += 1
            work.answered()
        case TpSwitched():
            work.answered()
