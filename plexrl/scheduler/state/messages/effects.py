"""What an event causes: commands, timers, blobs to delete, and groups whose next step is due."""

import heapq
from dataclasses import dataclass, field

from plexrl.ids import BlobRef, DeploymentId, GroupId, JobId, OperationId
from plexrl.scheduler.state.messages.timers import Subject, Timer, TimerKind
from plexrl.scheduler.state.records import State
from plexrl.wire.messages import Command, DiscardBlobs, SetTimer

TIMERS_MIN = 1024
"""Fewer timers are never swept."""


@dataclass(slots=True)
class Effects:
    """Effects of the event that is handled, and the timers that are set."""

    state: State
    """Read to find out which timers still have a purpose."""
    commands: list[Command] = field(default_factory=list)
    discards: list[BlobRef] = field(default_factory=list)
    dirty: dict[GroupId, None] = field(default_factory=dict)
    """Groups whose next step must be decided, in the order in which they were touched. Groups that
    were removed since are skipped."""
    cycles_over: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose cycle ended in this event."""
    timers: list[Timer] = field(default_factory=list)
    """Heap of (time, subject); an entry may have become pointless."""
    timer_at: float | None = None
    """Time of the last `SetTimer` that is not due yet."""
    wakes_sooner: bool = False
    """A timer earlier than `timer_at` was added."""
    for_stored: dict[DeploymentId, None] = field(init=False)
    """Deployments that may have a checkpoint or a host optimizer's step in their queue. One whose
    state is stored starts beside the holder of its group, so each step of the group looks for
    it."""

    def __post_init__(self) -> None:
        self.for_stored = {}
        for deployment in self.state.deployments.values():
            for name in (*deployment.work.queue, *deployment.work.new_runs):
                operation = self.state.operations.get(name)
                # A damaged queue fails the step that meets it, not the start of the scheduler.
                if operation is not None and operation.kind in deployment.spec.stored_kinds:
                    self.for_stored[deployment.deployment] = None

    def emit(self, command: Command) -> None:
        """Add a command to the result of this call."""
        self.commands.append(command)

    def touch(self, group: GroupId | None) -> None:
        """Decide the group's next step before this call returns."""
        if group is not None:
            self.dirty[group] = None

    def touch_all(self, groups: tuple[GroupId, ...]) -> None:
        """Decide the next steps of these groups before this call returns."""
        for group in groups:
            self.dirty[group] = None

    def discard(self, blob: BlobRef | None) -> None:
        """Delete a blob at the end of this call."""
        if blob is not None:
            self.discards.append(blob)

    def wake(self, at: float, what: Subject) -> None:
        """Set a timer for `what`."""
        heapq.heappush(self.timers, (at, what))
        if self.timer_at is not None and at < self.timer_at:
            self.wakes_sooner = True
        if len(self.timers) > 2 * self.state.timers_swept + TIMERS_MIN:
            self._sweep_timers()

    def due(self, now: float) -> list[Subject]:
        """Take the due subjects, without repetition, oldest first."""
        found: dict[Subject, None] = {}
        while self.timers and self.timers[0][0] <= now:
            found[heapq.heappop(self.timers)[1]] = None
        if self.timer_at is not None and self.timer_at <= now:
            self.timer_at = None
        return list(found)

    def take_commands(self) -> list[Command]:
        """The commands of this call. The last are those for deleted blobs, and for a timer earlier
        than the pending one."""
        commands, self.commands = self.commands, []
        if self.timer_at is None or self.wakes_sooner or self.discards:
            self._add_own(commands)
        return commands

    def _add_own(self, commands: list[Command]) -> None:
        self.wakes_sooner = False
        if self.discards:
            commands.append(DiscardBlobs(blobs=tuple(self.discards)))
            self.discards = []
        if self.timers:
            at, timer_at = self.timers[0][0], self.timer_at
            if timer_at is None or at < timer_at:
                self.timer_at = at
                commands.append(SetTimer(at=at))

    def _sweep_timers(self) -> None:
        """Remove pointless timers: most deadlines and controller timeouts are never reached."""
        # A sorted list is a heap, and is the same in every process.
        self.timers = sorted({timer for timer in self.timers if self._has_purpose(timer[1])})
        self.state.timers_swept = len(self.timers)

    def _has_purpose(self, what: Subject) -> bool:
        kind, name = what
        if kind is TimerKind.JOB:
            job = self.state.jobs.get(JobId(name))
            return job is not None and not job.state.is_final
        if kind is TimerKind.DEADLINE:
            operation = self.state.operations.get(OperationId(name))
            return operation is not None and not operation.state.is_final
        return kind is not TimerKind.GROUP or GroupId(name) in self.state.groups
