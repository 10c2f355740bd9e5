"""The trajectory server's core: all trajectories in flight, and their states (StaleFlow §5.1).

It holds each group from its start until it is trained, dropped or aborted, and forgets it then.
What the caller must store durably is what its methods return. Changes come as methods named for
what happens; each checks before it changes anything.

Invariant: a trajectory of a held group is in one state of `TrajectoryState` and is held until its
group is consumed, or until it is aborted and no instance has it any more. So a group that was
aborted can start again, with the same trajectories, when it is *settled*: when none of them is
held.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from plexrl.errors import ConflictError, InvalidRequestError, InvariantError
from plexrl.rollout.trajectories.lengths import Lengths
from plexrl.rollout.trajectories.record import (
    ON_INSTANCE,
    InstanceId,
    SampleGroupId,
    Trajectory,
    TrajectoryChange,
    TrajectoryId,
    TrajectorySegment,
    TrajectoryState,
    trajectory_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleGroup:
    """A prompt, whose samples are trained together."""

    id: SampleGroupId
    prompt_tokens: int
    members: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTrajectories:
    """The state of a trajectory server; see `TrajectoryServer.state`."""

    next_group: SampleGroupId
    groups: dict[SampleGroupId, int]
    """Prompt tokens of each held group."""
    records: list[Trajectory]
    """Trajectories on instances first, in the order of routing."""
    lengths: Lengths = field(default_factory=Lengths)


class TrajectoryServer:
    """Owner of the records of trajectories."""

    def __init__(self, *, samples: int) -> None:
        """`samples`: trajectory ids of a group."""
        self.samples = samples
        self.groups: dict[SampleGroupId, SampleGroup] = {}
        self.initial: dict[TrajectoryId, Trajectory] = {}
        """Trajectories to be routed that have no version, by id ascending."""
        self.returned: dict[TrajectoryId, Trajectory] = {}
        """Trajectories to be routed that have a version."""
        self.lengths = Lengths()
        self._all: dict[TrajectoryId, Trajectory] = {}
        self._on: dict[InstanceId, dict[TrajectoryId, None]] = {}
        self._next_group = SampleGroupId(0)

    def state(self) -> HeldTrajectories:
        """The state that a snapshot stores. The records are not copies: encode them before anything
        changes."""
        records = [record for name in sorted(self._on) for record in self.on_instance(name)]
        records += [each for _, each in sorted(self._all.items()) if each.instance is None]
        return HeldTrajectories(
            next_group=self._next_group,
            groups={group: each.prompt_tokens for group, each in self.groups.items()},
            records=records,
            lengths=self.lengths,
        )

    def restore(self, state: HeldTrajectories) -> None:
        """Takes over a state, of which it becomes the owner. The server is new."""
        self._next_group = state.next_group
        self.lengths = state.lengths
        for group, tokens in state.groups.items():
            members = trajectory_ids(group, self.samples)
            self.groups[group] = SampleGroup(id=group, prompt_tokens=tokens, members=members)
        for record in state.records:
            self._all[record.id] = record
            if record.instance is not None:
                self._on.setdefault(record.instance, {})[record.id] = None
            if record.state is TrajectoryState.WAITING:
                self._to_be_routed(record)[record.id] = record

    @property
    def prompts_added(self) -> int:
        """Number of prompts that were ever made known."""
        return self._next_group

    @property
    def waiting(self) -> int:
        """Number of trajectories to be routed."""
        return len(self.initial) + len(self.returned)

    def get(self, trajectory: TrajectoryId) -> Trajectory | None:
        """The record; None for a trajectory that is consumed or aborted.

        Raises InvalidRequestError: there never was such a trajectory.
        """
        found = self._all.get(trajectory)
        if found is None and not 0 <= trajectory < self._next_group * self.samples:
            raise InvalidRequestError(
                f"there is no trajectory {trajectory}: ids are below "
                f"{self._next_group * self.samples}"
            )
        return found

    def holds(self, group: SampleGroupId) -> bool:
        """True for a group that is neither consumed nor dropped.

        Raises InvalidRequestError: there never was such a group.
        """
        if not 0 <= group < self._next_group:
            raise InvalidRequestError(
                f"there is no group {group}: ids are below {self._next_group}"
            )
        return group in self.groups

    def members(self, group: SampleGroupId) -> Iterator[Trajectory]:
        """Records of a held group's members that are not aborted."""
        found = (self._all.get(member) for member in self.groups[group].members)
        return (
            trajectory
            for trajectory in found
            if trajectory and trajectory.state is not TrajectoryState.ABORTING
        )

    def on_instance(self, instance: InstanceId) -> list[Trajectory]:
        """Records of what the instance holds, in the order of routing."""
        return [self._all[trajectory] for trajectory in self._on.get(instance, ())]

    def add(self, group: SampleGroupId, prompt_tokens: int, expected_tokens: int = 0) -> None:
        """Makes a prompt known, with the expected length of its responses if not 0.

        Raises InvalidRequestError: the id does not follow the last one, the prompt is empty, or the
        expected length negative."""
        if group != self._next_group:
            raise InvalidRequestError(
                f"group {group} does not follow group {self._next_group - 1}: "
                f"add group {self._next_group}"
            )
        if prompt_tokens < 1:
            raise InvalidRequestError(f"the prompt of group {group} has no tokens: leave it out")
        if expected_tokens < 0:
            raise InvalidRequestError(f"group {group} cannot have {expected_tokens} tokens")
        self._next_group = SampleGroupId(group + 1)
        self.lengths.expect(group, expected_tokens)

    def is_settled(self, group: SampleGroupId) -> bool:
        """Whether no trajectory of the group is held."""
        return not any(
            trajectory in self._all for trajectory in trajectory_ids(group, self.samples)
        )

    def start(self, group: SampleGroupId, prompt_tokens: int, samples: int) -> None:
        """Starts the first `samples` trajectories of a known prompt.

        Raises ConflictError: the group is not settled.
        """
        if not self.is_settled(group):
            raise ConflictError(
                f"group {group} has trajectories: it can start when they have ended"
            )
        members = trajectory_ids(group, self.samples)
        self.groups[group] = SampleGroup(id=group, prompt_tokens=prompt_tokens, members=members)
        is_last = not self.initial or next(reversed(self.initial)) < members[0]
        for member in members[:samples]:
            record = Trajectory(id=member, group=group, prompt_tokens=prompt_tokens)
            self._all[member] = self.initial[member] = record
        if not is_last:
            self.initial = dict(sorted(self.initial.items()))

    def withdraw(self, group: SampleGroupId) -> None:
        """Takes back the start of a group none of whose trajectories was routed.

        Raises ConflictError: one was.
        """
        members = list(self.members(group))
        if any(member.id not in self.initial for member in members):
            raise ConflictError(f"group {group} has been routed: abort it")
        for member in members:
            self._end(member)
        self.forget_group(group)

    def assign(self, trajectory: Trajectory, version: int) -> None:
        """Gives an initial trajectory its version. Raises ConflictError: it has one."""
        if trajectory.version is not None:
            raise ConflictError(
                f"trajectory {trajectory.id} has version {trajectory.version} already",
                trajectory=trajectory.id,
            )
        trajectory.version = version
        self.returned[trajectory.id] = self.initial.pop(trajectory.id)

    def route(self, trajectory: Trajectory, instance: InstanceId, version: int) -> None:
        """Gives a waiting trajectory to an instance with weights of this version.

        Raises ConflictError: it is not waiting or has no version, or the weights are too old.
        """
        if trajectory.version is None or trajectory.version > version:
            raise ConflictError(
                f"trajectory {trajectory.id} has version {trajectory.version}: instance "
                f"{instance} of version {version} is too old for it"
            )
        trajectory.change(TrajectoryChange.ROUTE)
        trajectory.instance = instance
        del self.returned[trajectory.id]
        self._on.setdefault(instance, {})[trajectory.id] = None

    def interrupt(self, trajectory: Trajectory) -> None:
        """Its instance is to return it. Raises ConflictError: it is not routed."""
        trajectory.change(TrajectoryChange.INTERRUPT)

    def take_back(self, trajectory: Trajectory, segments: tuple[TrajectorySegment, ...]) -> None:
        """Its instance returned it, with what it generated there, or lost it.

        Raises:
            ConflictError: no instance has it.
            InvalidRequestError: a segment is of a wrong version.
        """
        trajectory.check_segments(segments)
        instance = trajectory.instance
        trajectory.change(TrajectoryChange.RETURN)
        trajectory.extend(segments)
        self._leave(trajectory, instance)
        self.returned[trajectory.id] = trajectory

    def generated(self, trajectory: Trajectory, segments: tuple[TrajectorySegment, ...]) -> None:
        """Its generation is complete. Raises as `take_back`."""
        trajectory.check_segments(segments)
        instance = trajectory.instance
        trajectory.change(TrajectoryChange.GENERATE)
        trajectory.extend(segments)
        self._leave(trajectory, instance)

    def rewarded(self, trajectory: Trajectory, reward: float) -> None:
        """Its reward is computed. Raises ConflictError: it is not generated, or has a reward."""
        trajectory.change(TrajectoryChange.REWARD)
        trajectory.reward = reward

    def abort(self, trajectory: Trajectory) -> bool:
        """Drops a trajectory; True if its instance has to discard it.

        Raises ConflictError: it is being aborted already.
        """
        trajectory.change(TrajectoryChange.ABORT)
        if trajectory.state is TrajectoryState.ABORTING:
            return True
        self._end(trajectory)
        return False

    def discarded(self, trajectory: Trajectory) -> None:
        """The instance has discarded an aborted trajectory."""
        instance = trajectory.instance
        trajectory.change(TrajectoryChange.DISCARD)
        self._leave(trajectory, instance)
        self._end(trajectory)

    def forget_group(self, group: SampleGroupId) -> None:
        """Makes room for another group: this one's trajectories are consumed or aborted."""
        del self.groups[group]
        self.lengths.forget(group)

    def consume(self, group: SampleGroupId, members: Iterable[TrajectoryId]) -> list[Trajectory]:
        """Hands over a group's complete records and forgets the group."""
        records = [self._all[member] for member in members]
        for record in records:
            record.change(TrajectoryChange.CONSUME)
            self.lengths.trained(group, record.response_tokens)
            self._end(record)
        self.forget_group(group)
        return records

    def _to_be_routed(self, trajectory: Trajectory) -> dict[TrajectoryId, Trajectory]:
        """Where the trajectory is while it waits."""
        return self.initial if trajectory.version is None else self.returned

    def _leave(self, trajectory: Trajectory, instance: InstanceId | None) -> None:
        if instance is not None:
            del self._on[instance][trajectory.id]
            if not self._on[instance]:
                del self._on[instance]

    def _end(self, trajectory: Trajectory) -> None:
        del self._all[trajectory.id]
        self._to_be_routed(trajectory).pop(trajectory.id, None)

    def check_invariants(self) -> None:
        """Raises InvariantError: an invariant of this module or of `record` does not hold."""
        if list(self.initial) != sorted(self.initial):
            raise InvariantError("initial trajectories are out of order", law="ids ascending")
        held = waiting = 0
        for each in self._all.values():
            state, instance = each.state, each.instance
            if (state in ON_INSTANCE) != (instance is not None):
                raise InvariantError(f"trajectory {each.id} is {state}", law="on an instance")
            held += instance is not None
            if instance is not None and each.id not in self._on.get(instance, ()):
                raise InvariantError(f"trajectory {each.id} is not listed", law="on an instance")
            if (state is TrajectoryState.WAITING) != (each.id in self._to_be_routed(each)):
                raise InvariantError(f"trajectory {each.id} is {state}", law="to be routed")
            waiting += state is TrajectoryState.WAITING
            if each.group not in self.groups and state is not TrajectoryState.ABORTING:
                raise InvariantError(f"trajectory {each.id} has no group", law="held with group")
            if each.version is None:
                if state is not TrajectoryState.WAITING or each.segments:
                    raise InvariantError(f"trajectory {each.id} has no version", law="version")
                continue
            for segment in each.segments:
                if segment.kv_version < each.version:
                    raise InvariantError(f"trajectory {each.id} is older", law="oldest version")
        if waiting != self.waiting:
            raise InvariantError("what is not waiting is to be routed", law="to be routed")
        if sum(map(len, self._on.values())) != held:
            raise InvariantError("an instance has what has ended", law="on an instance")
