"""Tail batching told from the outside: which prompts each batch must have, from events and commands
alone, while there are more prompts. It shares no code with `plexrl.rollout`, and knows nothing of
buffers and records."""

from dataclasses import dataclass, field

from plexrl.rollout.coordinator.messages import (
    Generated,
    GroupAdded,
    InstanceLost,
    ReportDroppedGroup,
    ReportQueuedGroup,
    Rewarded,
    RolloutCommand,
    RolloutEvent,
    Route,
    Train,
)


@dataclass
class Oracle:
    """Follows one history without changes of the policy."""

    prompts: int
    """Prompts of a batch."""
    samples: int
    """Trained samples of a prompt."""
    ids: int
    """Trajectory ids of a prompt."""
    new: set[int] = field(default_factory=set)
    """Prompts that no instance has had."""
    queue: list[int] = field(default_factory=list)
    is_long: bool = False
    first: set[int] = field(default_factory=set)
    """The prompts with which a long round began."""
    has_dropped: bool = False
    """A prompt of this round was dropped."""
    routed: set[int] = field(default_factory=set)
    """Prompts of this round that an instance has had."""
    instances: dict[int, str] = field(default_factory=dict)
    """Where each trajectory was routed last."""
    generated: dict[int, list[int]] = field(default_factory=dict)
    """Samples of each prompt, in the order in which they were generated."""
    rewarded: dict[int, set[int]] = field(default_factory=dict)
    complete: list[int] = field(default_factory=list)
    """Prompts of the present round in the order in which they were complete."""
    trained: list[int] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    rounds: list[str] = field(default_factory=list)

    def follow(self, event: RolloutEvent, commands: list[RolloutCommand]) -> None:
        """Raises AssertionError: the commands are not those of tail batching."""
        match event:
            case GroupAdded():
                self.new.add(event.group)
            case Generated() if self._is_held(event):
                self.generated.setdefault(event.trajectory // self.ids, []).append(event.trajectory)
            case Rewarded():
                self._rewarded(event.trajectory)
            case InstanceLost():
                self.instances = {
                    each: name for each, name in self.instances.items() if name != event.instance
                }
        queued: list[int] = [c.group for c in commands if isinstance(c, ReportQueuedGroup)]
        for command in commands:
            if isinstance(command, ReportDroppedGroup):
                self._dropped(command.group)
        if queued:
            self._queued(queued)
        for command in commands:
            if isinstance(command, Train):
                self._trained(command)
            elif isinstance(command, Route):
                for each in command.trajectories:
                    self.instances[each] = command.instance
                    self._routed(each)

    def _is_held(self, event: Generated) -> bool:
        if self.instances.get(event.trajectory) != event.instance:
            return False  # late, of an instance that was lost
        group = event.trajectory // self.ids
        if group not in self.routed or group in self.complete:
            return False
        return len(self.generated.get(group, ())) < self.samples

    def _rewarded(self, trajectory: int) -> None:
        group = trajectory // self.ids
        if trajectory not in self.generated.get(group, ()):
            return
        found = self.rewarded.setdefault(group, set())
        found.add(trajectory)
        if len(found) == self.samples:
            self.complete.append(group)

    def _dropped(self, group: int) -> None:
        self.dropped.add(group)
        self.has_dropped = True
        self.new.discard(group)
        self.routed.discard(group)
        if group in self.queue:
            self.queue.remove(group)
        if group in self.complete:
            self.complete.remove(group)
        self._forget(group)

    def _queued(self, groups: list[int]) -> None:
        """The others are aborted at the moment at which the batch is complete."""
        assert not self.is_long
        assert len(self.complete) == self.prompts
        assert groups == sorted(groups)
        # One that is on its way to an instance may have been aborted before it got there.
        assert self.routed - set(self.complete) <= set(groups) <= self.routed | self.new
        for group in groups:
            self.new.discard(group)
            self.routed.discard(group)
            self._forget(group)
        self.queue += groups

    def _forget(self, group: int) -> None:
        self.generated.pop(group, None)
        self.rewarded.pop(group, None)

    def _routed(self, trajectory: int) -> None:
        group = trajectory // self.ids
        assert group not in self.trained
        assert group not in self.dropped
        if group in self.queue:
            self.queue.remove(group)
        if self.is_long:
            assert trajectory % self.ids < self.samples, "a long round does not speculate"
            assert group in self.first or self.has_dropped
        else:
            assert group in self.new or group in self.routed, "a queued prompt in a short round"
        self.new.discard(group)
        self.routed.add(group)

    def _trained(self, command: Train) -> None:
        groups = [each.group for each in command.batch]
        assert len(groups) == self.prompts * self.samples
        assert sorted(set(groups)) == sorted(self.complete)
        for group in self.complete:
            members = {each.trajectory for each in command.batch if each.group == group}
            assert members == set(self.generated[group]), "not those that were generated first"
        assert all(each.version == command.version for each in command.batch), "an old sample"
        if self.is_long and not self.has_dropped:
            assert set(groups) == self.first
        self.trained += self.complete
        self.rounds.append("long" if self.is_long else "short")
        # What is left was never at an instance: all others were complete or queued.
        assert self.routed == set(self.complete)
        for group in self.complete:
            self._forget(group)
        self.complete, self.routed, self.has_dropped = [], set(), False
        self.is_long = len(self.queue) >= self.prompts
        self.first = set(self.queue[: self.prompts]) if self.is_long else set()
