"""The staleness manager: which versions trajectories may have, and when a batch is complete.

An entry of the buffers is a *group*: the samples of one prompt (StaleFlow §4.3). Its version is the
oldest `V_traj` of its members, and it occupies its entry when `group_size` members are complete.

Redundancy: a group has `extra_samples` more members, and a buffer `extra_groups` more reserved
entries. Members beyond the first `group_size` that are generated, and groups reserved in a buffer
that is full, are *surplus*: the caller aborts them. Interrupts and migrations change no entry,
since the version of a trajectory stays what it was.

Invariants, beside those of `buffers`:
- at most `(staleness + 1) * (batch_groups + extra_groups)` groups have entries;
- the version of a reserved entry is the minimum over its members.
"""

from dataclasses import dataclass, field, fields, replace

from plexrl.errors import ConflictError, InvalidRequestError, InvariantError
from plexrl.rollout.staleness.buffers import Buffers, BufferState
from plexrl.rollout.trajectories.record import SampleGroupId, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSettings:
    """The staleness bound and the sizes of batch and group."""

    staleness: int
    """η: a batch is trained at most this many versions after the version of its samples."""
    batch_groups: int
    """Groups of one training step."""
    group_size: int = 1
    """Samples of a prompt that are trained."""
    extra_groups: int = 0
    """Groups that a buffer reserves beyond `batch_groups`. When it is full, they begin anew in a
    long round if `staleness` is 0 (Flexes §3). Otherwise they are dropped, which shortens responses
    on average (StaleFlow App. C)."""
    extra_samples: int = 0
    """Samples of a group beyond `group_size`; the last ones are aborted."""
    first_version: int = 0
    """Version of the model when the rollout begins: that of the first buffer."""
    group_ids: int = 0
    """Trajectory ids of a group, which stay the same when the policy changes: `samples` or more. 0:
    `samples`."""

    def __post_init__(self) -> None:
        least = {"staleness": 0, "batch_groups": 1, "group_size": 1}
        for each in fields(self):
            value, minimum = getattr(self, each.name), least.get(each.name, 0)
            if value < minimum:
                raise InvalidRequestError(f"{each.name} is {value}: set it to {minimum} or more")
        if 0 < self.group_ids < self.samples:
            raise InvalidRequestError(
                f"a group has {self.group_ids} trajectory ids and starts {self.samples} samples: "
                "start fewer samples of a prompt, or create another rollout"
            )

    @property
    def samples(self) -> int:
        """Samples of a prompt that are started."""
        return self.group_size + self.extra_samples

    @property
    def groups_max(self) -> int:
        """Groups that can be in flight: started, and not consumed (StaleFlow §4.2)."""
        return (self.staleness + 1) * (self.batch_groups + self.extra_groups)

    @property
    def ids_per_group(self) -> int:
        """The number that `group_ids` stands for."""
        return self.group_ids or self.samples

    def check_change(self, after: "StalenessSettings") -> None:
        """Raises InvalidRequestError: a rollout with these settings cannot go on with others, since
        more changes than the staleness and the redundancy."""
        same = replace(
            self,
            staleness=after.staleness,
            extra_groups=after.extra_groups,
            extra_samples=after.extra_samples,
            group_ids=self.ids_per_group,
        )
        if replace(after, group_ids=after.ids_per_group) != same:
            raise InvalidRequestError(
                f"a rollout with {self} cannot go on with {after}: keep the sizes of batch and "
                "group, the first version and the trajectory ids of a group"
            )

    @property
    def is_speculative(self) -> bool:
        """Whether rounds are short and long ones (Flexes §3)."""
        return not self.staleness and bool(self.extra_groups or self.extra_samples)


@dataclass(slots=True, kw_only=True)
class _Members:
    versions: dict[TrajectoryId, int] = field(default_factory=dict)
    complete: set[TrajectoryId] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferEntry:
    """The entry of a group in a buffer."""

    group: SampleGroupId
    buffer: int
    version: int
    """V of the group; its members may have newer versions."""
    is_occupied: bool
    members: dict[TrajectoryId, int]
    """Version of each member."""
    complete: list[TrajectoryId]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldEntries:
    """All entries, and the first buffer that is not consumed."""

    next_version: int
    entries: list[BufferEntry]


class StalenessManager:
    """Tracker and discriminator of the staleness bound (StaleFlow §4)."""

    def __init__(self, settings: StalenessSettings) -> None:
        self.settings = settings
        self.buffers = Buffers(
            staleness=settings.staleness,
            size=settings.batch_groups,
            extra=settings.extra_groups,
            first_version=settings.first_version,
        )
        self._members: dict[SampleGroupId, _Members] = {}

    def state(self) -> HeldEntries:
        """All entries. Their members are not copies: encode them before anything changes."""
        buffers = self.buffers
        return HeldEntries(
            next_version=buffers.next_version,
            entries=[
                BufferEntry(
                    group=group,
                    buffer=place,
                    version=version,
                    is_occupied=group in buffer.occupied,
                    members=self._members[group].versions,
                    complete=sorted(self._members[group].complete),
                )
                for place, buffer in buffers.entries()
                for group, version in sorted((buffer.reserved | buffer.occupied).items())
            ],
        )

    def restore(self, state: HeldEntries) -> None:
        """Takes over a state, of which it becomes the owner. The manager is new."""
        self.buffers.next_version = state.next_version
        for entry in state.entries:
            self.buffers.put(
                entry.group, entry.version, entry.buffer, is_occupied=entry.is_occupied
            )
            self._members[entry.group] = _Members(
                versions=entry.members, complete=set(entry.complete)
            )

    def reserve(self, group: SampleGroupId, trajectory: TrajectoryId, version: int) -> None:
        """Assigns the version to the trajectory; see `Buffers.admits` and `Buffers.assign`.

        Raises ConflictError: the version breaks the bound, or the trajectory has a version.
        """
        members = self._members.get(group)
        if members is not None and trajectory in members.versions:
            raise ConflictError(f"trajectory {trajectory} has a version already")
        self.buffers.assign(group, version)
        self._members.setdefault(group, _Members()).versions[trajectory] = version

    def complete(
        self, group: SampleGroupId, trajectory: TrajectoryId
    ) -> tuple[SampleGroupId, ...] | None:
        """Records a generated and rewarded member; the last one occupies the group's entry.

        Returns None while the group lacks members. When it is complete: the surplus groups of a
        buffer that is full now. They are released; the caller aborts their trajectories.

        Raises ConflictError: the trajectory has no version, or is complete.
        """
        members = self._members.get(group)
        if members is None or trajectory not in members.versions:
            raise ConflictError(f"trajectory {trajectory} of group {group} is not reserved")
        if trajectory in members.complete:
            raise ConflictError(f"trajectory {trajectory} is complete already")
        members.complete.add(trajectory)
        if len(members.complete) < self.settings.group_size:
            return None
        for each in members.versions.keys() - members.complete:
            del members.versions[each]
        return self._drop_surplus(self.buffers.occupy(group))

    def drop(self, group: SampleGroupId) -> tuple[SampleGroupId, ...]:
        """Forgets a group: filtered, failed or aborted. Later complete groups move forward, which
        may fill a buffer. Returns surplus groups, as `complete` does.

        Raises ConflictError: the group has no entry.
        """
        self.buffers.release(group)
        del self._members[group]
        dropped: list[SampleGroupId] = []
        for version, _ in list(self.buffers.entries()):
            dropped += self._drop_surplus(version)
        return tuple(dropped)

    def change(self, settings: StalenessSettings) -> tuple[SampleGroupId, ...]:
        """Moves all entries into buffers of other sizes. Complete groups come first, then older
        ones. Those for which there is no place are released, and returned."""
        entries = sorted(
            self.state().entries, key=lambda e: (not e.is_occupied, e.version, e.group)
        )
        first, self.settings = self.buffers.next_version, settings
        self.buffers = Buffers(
            staleness=settings.staleness,
            size=settings.batch_groups,
            extra=settings.extra_groups,
            first_version=first,
        )
        released = []
        for entry in entries:
            if not self.buffers.admits(entry.group, entry.version):
                del self._members[entry.group]
                released.append(entry.group)
                continue
            self.buffers.assign(entry.group, entry.version)
            if entry.is_occupied:
                self.buffers.occupy(entry.group)
        return tuple(released)

    def is_ready(self) -> bool:
        """True if the next buffer can be consumed."""
        return self.buffers.state(self.buffers.next_version) is BufferState.READY

    def complete_groups(self) -> dict[SampleGroupId, tuple[TrajectoryId, ...]]:
        """Groups of the next buffer that are complete, as `consume` returns them. They stay in it,
        unless they are dropped or the sizes change."""
        groups = sorted(self.buffers.buffer(self.buffers.next_version).occupied)
        return {group: tuple(sorted(self._members[group].complete)) for group in groups}

    def consume(self) -> dict[SampleGroupId, tuple[TrajectoryId, ...]]:
        """Retires the next buffer: its groups by id, each with its members.

        Raises ConflictError: the buffer is not ready.
        """
        groups = sorted(self.buffers.consume())
        return {group: tuple(sorted(self._members.pop(group).versions)) for group in groups}

    def _drop_surplus(self, version: int) -> tuple[SampleGroupId, ...]:
        """Releases what is reserved in a buffer that is full."""
        if self.buffers.state(version) is not BufferState.READY:
            return ()
        groups = tuple(sorted(self.buffers.buffer(version).reserved))
        for group in groups:
            self.buffers.release(group)
            del self._members[group]
        return groups

    def check_invariants(self) -> None:
        """Raises InvariantError: an invariant of this module or of `buffers` does not hold."""
        self.buffers.check_invariants()
        if len(self.buffers) > self.settings.groups_max:
            raise InvariantError(
                f"{len(self.buffers)} groups have entries; {self.settings.groups_max} may",
                law="groups in flight",
            )
        for group, members in self._members.items():
            oldest = min(members.versions.values())
            occupied = self.buffers.is_occupied(group)
            if not occupied and self.buffers.version(group) != oldest:
                raise InvariantError(f"group {group} has a member of {oldest}", law="group version")
            if occupied != (len(members.complete) == self.settings.group_size):
                raise InvariantError(f"group {group} is not complete", law="occupied when complete")
