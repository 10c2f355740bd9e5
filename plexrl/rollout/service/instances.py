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

    def _settle(self) -> None:
        while self.unanswered and isinstance(self.unanswered[0], Route):
            self.unanswered.popleft()

    def _answered(self) -> None:
        self.unanswered.popleft()
        self._settle()


class Instances:
    """All instances of a rollout."""

    def __init__(self) -> None:
        self.work: dict[InstanceId, InstanceWork] = {}
        self._routed: Counter[TrajectoryId] = Counter()

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
                    self._routed[each] += 1
                    work.held[each] = self._routed[each]
            work.unanswered.append(command)
            work._settle()
            found.append(command)
        return found

    def forget(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Forgets trajectories that have ended."""
        for each in trajectories:
            self._routed.pop(each, None)

    def _note_event(self, event: Event) -> None:
        match event:
            case InstanceJoined():
                self.work[event.instance] = InstanceWork(
                    version=event.version, kv_budget=event.kv_budget
                )
            case Generated():
                work = self.work[event.instance]
                work.held.pop(event.trajectory, None)
                work.completed += 1
            case GenerationFailed():
                self.work[event.instance].held.pop(event.trajectory, None)
            case Stopped():
                work = self.work[event.instance]
                for each in event.trajectories:
                    work.held.pop(each.trajectory, None)
                work._answered()
            case Pulled():
                work = self.work[event.instance]
                work.version, work.completed = event.version, 0
                work.pulls += 1
                work._answered()
            case _:
                pass
