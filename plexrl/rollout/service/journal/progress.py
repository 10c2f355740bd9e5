"""Counts of what a rollout has generated, trained and dropped; a replay of the events gives the
same."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    Generated,
    GenerationFailed,
    GroupAdded,
    GroupFiltered,
    InstanceJoined,
    InstancesChosen,
    PolicyChanged,
    ReportDroppedGroup,
    ReportQueuedGroup,
    ReportScaleDown,
    Rewarded,
    RolloutCommand,
    RolloutEvent,
    TpSwitched,
    Train,
)
from plexrl.rollout.policies.tail_batching.rounds import RoundKind
from plexrl.rollout.service.order import RolloutOrder, deployment_of
from plexrl.rollout.trajectories.record import (
    SampleGroupId,
    TrajectoryId,
    TrajectoryState,
    group_of,
    trajectory_ids,
)

BATCHES_KEPT = 32
RESPONSES_KEPT = 1024


@dataclass(slots=True, kw_only=True)
class Count:
    """Samples, and the tokens of their responses."""

    samples: int = 0
    tokens: int = 0

    def add(self, tokens: Iterable[int]) -> None:
        """Counts a sample for each number of tokens."""
        for token in tokens:
            self.samples += 1
            self.tokens += token


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBatch:
    """The record of a trained batch."""

    version: int
    samples: int
    tokens: int
    """Tokens of the responses."""
    staleness: dict[int, int]
    """Samples by `version` less V_traj."""
    round: RoundKind | None = None
    """The kind of its round; None: its policy had no rounds."""


@dataclass(slots=True, kw_only=True)
class RolloutProgress:
    """Counts since the rollout was created, and what its controller has to answer next."""

    group_size: int
    """Trajectory ids of a prompt."""
    requested: int = -1
    """Version of the latest batch that the trainer asked for."""
    batch: Train | None = None
    """The latest batch."""
    next_group: SampleGroupId = SampleGroupId(0)
    unrewarded: dict[TrajectoryId, int] = field(default_factory=dict)
    """Generated trajectories without a reward, by the number of the event."""
    lengths: dict[TrajectoryId, int] = field(default_factory=dict)
    """Tokens of the generated responses of groups that are neither trained nor dropped."""
    generated: Count = field(default_factory=Count)
    """Responses that were generated to their end."""
    trained: Count = field(default_factory=Count)
    """Generated samples that were handed to the trainer."""
    dropped: Count = field(default_factory=Count)
    """Generated samples whose group was dropped."""
    unfinished: int = 0
    """Samples of dropped groups that were not generated to their end."""
    dropped_groups: int = 0
    dropped_reason: str = ""
    """The latest reason."""
    aborted_groups: int = 0
    """Times that a group was aborted, to begin anew."""
    aborted: Count = field(default_factory=Count)
    """Responses of those groups that were generated to their end."""
    failed_generations: int = 0
    failed_groups: int = 0
    """Groups dropped because of failed generations, since the latest success of one."""
    groups_without_reward: int = 0
    """Groups dropped because a reward failed, since the latest reward."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Trained samples by the version of their batch less V_traj."""
    batches: list[TrainedBatch] = field(default_factory=list)
    """The latest ones."""
    lengths_by_prompt: list[tuple[int, list[int]]] = field(default_factory=list)
    """Tokens of each of the latest trained prompts, and of its responses; `RESPONSES_KEPT` or a few
    more responses."""
    joins: dict[str, int] = field(default_factory=dict)
    """How often each deployment has joined."""
    round: RoundKind | None = None
    """The kind of the present round."""
    scale_downs: int = 0
    """Rounds in which instances were freed."""
    deployments: list[str] = field(default_factory=list)
    """Deployments that are to generate, once their number has changed; empty: those of the
    order."""
    ending: list[str] = field(default_factory=list)
    """Deployments that are to be ended."""
    added: int = 0
    """Instances that were added, also those that the cluster refused."""
    removed: int = 0
    change_reason: str = ""
    """Reason of the latest change of the number of instances."""
    tp_switches: int = 0
    """Switches of the engines' tensor-parallel groups that were carried out."""

    def note(
        self,
        seq: int,
        event: RolloutEvent,
        commands: Iterable[RolloutCommand],
        core: RolloutCoordinator,
    ) -> None:
        """Records an event and its commands; `core` has handled it."""
        match event:
            case Generated():
                record = core.trajectories.get(event.trajectory)
                if record is not None and record.state is TrajectoryState.GENERATED:
                    self.unrewarded[event.trajectory] = seq
                    self.lengths[event.trajectory] = record.response_tokens
                    self.generated.add([record.response_tokens])
                    self.failed_groups = 0
            case GenerationFailed():
                self.failed_generations += 1
            case Rewarded():
                self.unrewarded.pop(event.trajectory, None)
                self.groups_without_reward = 0
            case GroupAdded():
                self.next_group = SampleGroupId(event.group + 1)
            case InstanceJoined():
                name = deployment_of(event.instance)
                self.joins[name] = self.joins.get(name, 0) + 1
            case InstancesChosen():
                self._chosen(event)
            case PolicyChanged():
                # Its controller has asked for it again: the causes of failures are mended.
                self.failed_groups = self.groups_without_reward = 0
            case TpSwitched():
                self.tp_switches += event.has_switched
            case BatchRequested():
                self.requested = core.manager.buffers.next_version
            case _:
                pass
        for command in commands:
            if isinstance(command, Train):
                self._trained(command)
            elif isinstance(command, ReportDroppedGroup):
                self._dropped(event, command)
            elif isinstance(command, ReportScaleDown):
                self.scale_downs += bool(command.freed)
            elif isinstance(command, ReportQueuedGroup):
                self.aborted_groups += 1
                self.aborted.add(self._end(command.group))
        self.round = core.rounds.kind

    def names(self, order: RolloutOrder) -> tuple[str, ...]:
        """The deployments that are to generate."""
        return tuple(self.deployments) or order.instances

    def _chosen(self, event: InstancesChosen) -> None:
        self.deployments, self.ending = list(event.deployments), list(event.ending)
        self.added += event.change > 0
        self.removed += event.change < 0
        self.change_reason = event.reason or self.change_reason

    def _trained(self, train: Train) -> None:
        self.batch, self.requested = train, train.version
        tokens = [sum(part.tokens for part in trajectory.segments) for trajectory in train.batch]
        self.trained.add(tokens)
        ages: dict[int, int] = {}
        for trajectory in train.batch:
            age = train.version - trajectory.version
            ages[age] = ages.get(age, 0) + 1
            self.staleness[age] = self.staleness.get(age, 0) + 1
        self.batches.append(
            TrainedBatch(
                version=train.version,
                samples=len(tokens),
                tokens=sum(tokens),
                staleness=dict(sorted(ages.items())),
                round=self.round,
            )
        )
        del self.batches[:-BATCHES_KEPT]
        self._keep_lengths(train)
        for group in {trajectory.group for trajectory in train.batch}:
            self._end(group)

    def _keep_lengths(self, train: Train) -> None:
        groups: dict[SampleGroupId, tuple[int, list[int]]] = {}
        for trajectory in train.batch:
            lengths = groups.setdefault(trajectory.group, (trajectory.prompt_tokens, []))[1]
            lengths.append(sum(part.tokens for part in trajectory.segments))
        kept = [*self.lengths_by_prompt, *groups.values()]
        samples = max(1, len(train.batch) // max(1, len(groups)))
        self.lengths_by_prompt = kept[-max(len(groups), RESPONSES_KEPT // samples) :]

    def _dropped(self, event: RolloutEvent, command: ReportDroppedGroup) -> None:
        self.dropped_groups += 1
        self.dropped_reason = command.reason
        if isinstance(event, GenerationFailed):
            # Another group that becomes surplus by that has not failed.
            is_own = group_of(event.trajectory, self.group_size) == command.group
            self.failed_groups += is_own
        elif isinstance(event, GroupFiltered) and event.group == command.group:
            self.groups_without_reward += 1
        generated = self._end(command.group)
        self.dropped.add(generated)
        self.unfinished += self.group_size - len(generated)

    def _end(self, group: SampleGroupId) -> list[int]:
        """Forgets a group; returns the lengths of its generated responses."""
        found = []
        for trajectory in trajectory_ids(group, self.group_size):
            self.unrewarded.pop(trajectory, None)
            if (length := self.lengths.pop(trajectory, None)) is not None:
                found.append(length)
        return found
