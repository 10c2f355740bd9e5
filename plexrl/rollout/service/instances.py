"""What each instance was told and has answered; a replay of the events gives the same."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from plexrl.rollout.coordinator.messages import (
    Abort,
    Command,
    Event,
    Generated,
    GenerationFailed,
    InstanceJoined,
    InstanceLost,
    Interrupt,
    Pull,
    Pulled,
    Route,
    Stopped,
)
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId

InstanceCommand = Route | Interrupt | Abort | Pull


@dataclass(slots=True, kw_only=True)
class InstanceWork:
    """One instance."""

    version: int
    kv_budget: float
    """Tokens."""
    unanswered: deque[InstanceCommand] = field(default_factory=deque)
    """Commands from the first stop or pull on that is not answered."""
    held: dict[TrajectoryId, int] = field(default_factory=dict)
    """Trajectories routed there that have not ended, and how often each was routed."""
    completed: int = 0
    """Trajectories completed since the last pull."""
    pulls: int = 0
    """Pulls answered so far."""

    def begun(self) -> list[TrajectoryId]:
        """Trajectories whose `Route` does not wait for another command."""
        later = {
            t for each in self.unanswered if isinstance(each, Route) for t in each.trajectories
        }
        return [each for each in self.held if each not in later]

    def add(self, command: InstanceCommand) -> None:
        """The instance is told something."""
        self.unanswered.append(command)
        self._settle()

    def answered(self) -> None:
        """The oldest stop or pull is answered."""
        self.unanswered.popleft()
        self._settle()

    def _settle(self) -> None:
        while self.unanswered and isinstance(self.unanswered[0], Route):
            self.unanswered.popleft()


class Instances:
    """All instances of a rollout."""

    def __init__(self) -> None:
        self.work: dict[InstanceId, InstanceWork] = {}
        self.routed: Counter[TrajectoryId] = Counter()
        """How often each trajectory was routed."""

    def note(self, event: Event, commands: Iterable[Command]) -> list[InstanceCommand]:
        """Records an event and its commands; returns those for instances, in order."""
        self._note_event(event)
        found: list[InstanceCommand] = []
        for command in commands:
            if not isinstance(command, InstanceCommand):
                continue
            work = self.work[command.instance]
            if isinstance(command, Route):
                for each in command.trajectories:
                    self.routed[each] += 1
                    work.held[each] = self.routed[each]
            work.add(command)
            found.append(command)
        return found

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Forgets trajectories that have ended."""
        for each in trajectories:
            self.routed.pop(each, None)

    def _note_event(self, event: Event) -> None:
        if isinstance(event, InstanceJoined):
            self.work[event.instance] = InstanceWork(
                version=event.version, kv_budget=event.kv_budget
            )
        elif isinstance(event, InstanceLost):
            self.work.pop(event.instance, None)
        elif isinstance(event, Generated | GenerationFailed | Stopped | Pulled):
            work = self.work.get(event.instance)
            if work is not None:  # otherwise it is lost
                _note_answer(work, event)


def _note_answer(
    work: InstanceWork, event: Generated | GenerationFailed | Stopped | Pulled
) -> None:
    match event:
        case Generated():
            if work.held.pop(event.trajectory, None) is not None:
                work.completed += 1
        case GenerationFailed():
            work.held.pop(event.trajectory, None)
        case Stopped():
            for each in event.trajectories:
                work.held.pop(each.trajectory, None)
            work.answered()
        case Pulled():
            work.version, work.completed = event.version, 0
            work.pulls += 1
            work.answered()
