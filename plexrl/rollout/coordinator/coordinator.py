"""The rollout coordinator: one core that takes events and returns commands (StaleFlow §5).

`handle` is its only way in. It owns the records of trajectories (`trajectories`), the staleness
protocol (`manager`), and what instances have (`assignments`). Every accepted snapshot starts one
cycle of Alg. 1: synchronisation, migration, routing.

Late messages are expected: an event of a lost instance, or about a trajectory that has ended or is
on another instance by now, changes nothing and returns no command.

Invariants, beside those of the parts:
- a group with an entry in the staleness buffers is held by the trajectory server;
- a member has the same version in both;
- a prompt is started, or waits to be started (`rounds`), and not both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from plexrl.errors import ConflictError, InvalidRequestError, InvariantError
from plexrl.rollout.coordinator.assignment.assignments import Assignments
from plexrl.rollout.coordinator.cost_fit import CostFit
from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    Generated,
    GenerationFailed,
    GroupAdded,
    GroupFiltered,
    InstanceJoined,
    InstanceLost,
    InstancesChosen,
    ParametersPushed,
    PolicyChanged,
    PromptsEnded,
    Pull,
    Pulled,
    ReportDroppedGroup,
    ReportQueuedGroup,
    ReportScaleDown,
    Rewarded,
    RolloutCommand,
    RolloutEvent,
    SharingChanged,
    SnapshotTaken,
    StepsMeasured,
    Stopped,
    SwitchTp,
    TpSwitched,
    Train,
    TrainedTrajectory,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings, are_equal
from plexrl.rollout.coordinator.state import CoordinatorState
from plexrl.rollout.coordinator.strategies.cycle import CoordinatorCycle
from plexrl.rollout.coordinator.strategies.length_aware import divide_instances
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.adaptive_tp.engines import AdaptiveTp
from plexrl.rollout.policies.freed_instances import FreedInstances
from plexrl.rollout.policies.tail_batching.over_launch import RoundSetting, SeenPrompt
from plexrl.rollout.policies.tail_batching.rounds import Rounds
from plexrl.rollout.staleness.manager import StalenessManager
from plexrl.rollout.trajectories.record import (
    GENERATED,
    InstanceId,
    SampleGroupId,
    Trajectory,
    TrajectoryId,
    TrajectoryState,
)
from plexrl.rollout.trajectories.server import TrajectoryServer


class RolloutCoordinator:
    """Decides where trajectories are generated, on which weights, and what is trained."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.manager = StalenessManager(settings.staleness)
        self.trajectories = TrajectoryServer(samples=settings.staleness.ids_per_group)
        self.rounds = Rounds(settings.staleness, is_fixed=settings.fixed_over_launch)
        self.freed = FreedInstances(settings.scale_down)
        self.adaptive_tp = AdaptiveTp(settings.adaptive_tp)
        self.assignments = Assignments(self.trajectories)
        self.newest_version = settings.staleness.first_version
        """Version that the parameter server serves."""
        self.snapshots_used = 0
        self.snapshots_refused = 0
        """Snapshots that did not show the effect of every command."""
        self._fit = CostFit(settings.cost_model, steps_max=settings.measured_steps_max)
        self._is_trainer_free = False

    def state(self) -> dict[str, object]:
        """The whole state, as plain data that can be written as JSON: mappings (their order
        counts), lists, text, numbers and None. It holds what is in flight and the latest measured
        steps; nothing of what was trained or dropped."""
        return CoordinatorState(
            bound=self.settings.staleness,
            newest_version=self.newest_version,
            is_trainer_free=self._is_trainer_free,
            trajectories=self.trajectories.state(),
            entries=self.manager.state(),
            instances=self.assignments.instances,
            measured=self._fit.state(),
            prompts=self.rounds.held,
            scale_down=self.freed.held,
        ).plain()

    @classmethod
    def restore(
        cls, settings: CoordinatorSettings, state: Mapping[str, object]
    ) -> "RolloutCoordinator":
        """A coordinator that goes on from the state as the one which it is of. Strategies and
        thresholds may differ.

        Raises:
            InvalidRequestError: it is no state, or that of other staleness settings.
            InvariantError: the state contradicts itself.
        """
        found = CoordinatorState.decode(settings.staleness, state)
        core = cls(settings)
        core.newest_version = found.newest_version
        core._is_trainer_free = found.is_trainer_free
        core.trajectories.restore(found.trajectories)
        core.manager.restore(found.entries)
        core.rounds = Rounds(settings.staleness, found.prompts)
        core.freed = FreedInstances(settings.scale_down, found.scale_down)
        core.assignments = Assignments(core.trajectories, found.instances)
        core._fit.restore(found.measured)
        core.check_invariants()
        return core

    @property
    def cost_model(self) -> CostModel:
        """Fitted to the latest measured steps."""
        return self._fit.model

    @property
    def groups_wanted(self) -> int:
        """Number of `GroupAdded` that are accepted now."""
        return self.rounds.wanted(len(self.trajectories.groups))

    def handle(self, event: RolloutEvent) -> list[RolloutCommand]:
        """The commands that follow from an event. A refused event changes nothing.

        Raises:
            InvalidRequestError: the event contradicts the protocol of `messages`.
            ConflictError: the event does not fit the state of what it names.
        """
        commands = self._decide(event)
        self.rounds.start(self.trajectories)
        return commands + self.assignments.release()

    def _decide(self, event: RolloutEvent) -> list[RolloutCommand]:
        match event:
            case SnapshotTaken():
                return self._on_snapshot(event)
            case Generated():
                return self._on_generated(event)
            case Rewarded():
                return self._on_rewarded(event)
            case Stopped():
                if event.instance in self.assignments.instances:
                    self.assignments.stopped(event)
                return []
            case Pulled():
                if event.instance in self.assignments.instances:
                    self._check_version(event.version)
                    self.assignments.expected.pulled(event.instance, event.version)
                return []
            case TpSwitched():
                if event.instance in self.assignments.instances:
                    self.assignments.expected.switched(event.instance)
                return []
            case GenerationFailed():
                return self._on_failed(event)
            case GroupAdded():
                self._on_added(event)
                return []
            case PromptsEnded():
                self.rounds.end()
                return []
            case PolicyChanged():
                return self._on_policy_changed(event)
            case GroupFiltered():
                return self._on_filtered(event)
            case BatchRequested():
                self._is_trainer_free = True
                return self._train_if_ready()
            case ParametersPushed():
                self._on_pushed(event)
                return []
            case InstanceJoined():
                self._on_joined(event)
                return []
            case SharingChanged():
                if event.instance in self.assignments.instances:
                    instance = self.assignments.instances[event.instance]
                    instance.is_with_trainer = event.is_with_trainer
                return []
            case InstanceLost():
                self._on_lost(event)
                return []
            case InstancesChosen():
                self._on_chosen(event)
                return []
            case StepsMeasured():
                self._fit.add(event.steps)
                return []
            case _:
                raise InvalidRequestError(f"{type(event).__name__} is no event of the coordinator")

    @property
    def measured_steps(self) -> int:
        """Number of decode steps to which it is fitted."""
        return len(self._fit.state())

    def _on_added(self, event: GroupAdded) -> None:
        if self.groups_wanted < 1:
            raise ConflictError(
                f"{len(self.trajectories.groups)} groups are in flight, as many as the policy "
                "allows: add more after the next batch is consumed"
            )
        self.trajectories.add(event.group, event.prompt_tokens, event.expected_tokens)
        self.rounds.add(event.group, event.prompt_tokens)

    def _on_policy_changed(self, event: PolicyChanged) -> list[RolloutCommand]:
        self.settings.staleness.check_change(event.bound)
        is_same = (event.bound, event.fixed_over_launch) == (
            self.settings.staleness,
            self.settings.fixed_over_launch,
        )
        self.settings = replace(
            self.settings,
            staleness=event.bound,
            routing=event.routing,
            scale_down=event.scale_down,
            adaptive_tp=event.adaptive_tp,
            fixed_over_launch=event.fixed_over_launch,
        )
        self.freed.change(event.scale_down)
        self.adaptive_tp = AdaptiveTp(event.adaptive_tp)
        if is_same:
            return []
        self.rounds.put_back(self.trajectories, self.manager.buffers)
        commands: list[RolloutCommand] = []
        for group in self.manager.change(event.bound):
            commands += self._queue(group)
        self.rounds.change(event.bound, is_fixed=event.fixed_over_launch)
        return commands + self._train_if_ready()

    def _on_snapshot(self, event: SnapshotTaken) -> list[RolloutCommand]:
        if not self.assignments.expected.matches(event.instances):
            self.snapshots_refused += 1
            return []
        self.snapshots_used += 1
        instances, model = self.assignments.instances, self._fit.model
        leaving = self.assignments.to_drain()
        if leaving:
            return self.assignments.interrupt(leaving)
        snapshots = [
            snapshot for snapshot in event.instances if not instances[snapshot.instance].is_draining
        ]
        freed = self.freed.free(self.trajectories, self.rounds, snapshots, instances, model)
        if freed is not None:
            # What they return is routed in the next cycle.
            return [ReportScaleDown(freed=tuple(freed)), *self.assignments.interrupt(freed)]
        budgets = {name: each.kv_budget for name, each in instances.items()}
        others = self.freed.others(snapshots)
        if self.settings.routing == "length-aware":
            divide_instances(
                model,
                self.trajectories,
                [budgets[other.instance] for other in others if other.serves],
                self.settings.staleness.group_size,
            )
        cycle = CoordinatorCycle(
            self.settings, model, self.trajectories, self.manager.buffers, others, budgets
        )
        decision = cycle.decide(self.newest_version)
        commands = self.assignments.interrupt(decision.interrupts)
        for instance in decision.pulls:
            self.assignments.expected.pull_issued(instance, self.newest_version)
            commands.append(Pull(instance=instance, version=self.newest_version))
        self._route(decision.routes)
        return commands or self._switch_groups(event)

    def _switch_groups(self, event: SnapshotTaken) -> list[RolloutCommand]:
        """The commands that switch tensor-parallel groups, of instances that get no other
        command."""
        commands: list[RolloutCommand] = []
        found = self.adaptive_tp.switches(
            self.trajectories, self.rounds, event.instances, self.assignments.instances
        )
        for instance, switch in found.items():
            self.assignments.expected.switch_issued(instance)
            commands.append(
                SwitchTp(instance=instance, tp=switch.tp, kv=switch.kv, gain_s=switch.gain_s)
            )
        return commands

    def _route(self, routes: list[tuple[TrajectoryId, InstanceId, int]]) -> None:
        for each, instance, version in routes:
            record = self._held(each)
            if record.version is None:
                self.manager.reserve(record.group, each, version)
                self.trajectories.assign(record, version)
            self.assignments.add(each, instance)

    def _on_generated(self, event: Generated) -> list[RolloutCommand]:
        record = self._record(event.trajectory, event.instance)
        if record is None:
            return []
        is_kept = record.state is not TrajectoryState.ABORTING
        if is_kept:
            self.trajectories.generated(record, event.segments)
        else:
            self.trajectories.discarded(record)
        self.assignments.generated(event.instance, event.trajectory)
        return self._abort_surplus(record.group) if is_kept else []

    def _abort_surplus(self, group: SampleGroupId) -> list[RolloutCommand]:
        """Aborts the other members of a group once enough are generated. Their rewards do not
        matter: to wait for those would favour samples that are graded quickly."""
        members = list(self.trajectories.members(group))
        unfinished = [member for member in members if member.state not in GENERATED]
        if len(members) - len(unfinished) < self.settings.staleness.group_size:
            return []
        return self.assignments.abort(unfinished)

    def _on_failed(self, event: GenerationFailed) -> list[RolloutCommand]:
        record = self._record(event.trajectory, event.instance)
        if record is None:
            return []
        self.assignments.expected.failed(event.instance, event.trajectory)
        if record.state is TrajectoryState.ABORTING:
            self.trajectories.discarded(record)
            return []
        self.trajectories.take_back(record, ())
        record.failures += 1
        if record.failures < self.settings.failures_max:
            return []
        reason = f"trajectory {record.id} failed {record.failures} times: {event.reason}"
        return self._drop(record.group, reason)

    def _on_rewarded(self, event: Rewarded) -> list[RolloutCommand]:
        if not math.isfinite(event.reward):
            raise InvalidRequestError(
                f"the reward of trajectory {event.trajectory} is {event.reward}: report a failed "
                "reward as `GroupFiltered`"
            )
        record = self.trajectories.get(event.trajectory)
        if record is None or record.state is TrajectoryState.ABORTING:
            return []
        self.trajectories.rewarded(record, event.reward)
        if self.settings.dynamic_sampling:
            members = list(self.trajectories.members(record.group))
            rewards = [member.reward for member in members if member.reward is not None]
            is_complete = len(rewards) == len(members) == self.settings.staleness.group_size
            if is_complete and are_equal(rewards):
                return self._drop(record.group, "equal rewards")
        surplus = self.manager.complete(record.group, record.id)
        if surplus is None:
            return []
        commands: list[RolloutCommand] = []
        for group in surplus:
            commands += self._end_surplus(group)
        return commands + self._train_if_ready()

    def _on_filtered(self, event: GroupFiltered) -> list[RolloutCommand]:
        return self._drop(event.group, event.reason) if self.trajectories.holds(event.group) else []

    def _on_pushed(self, event: ParametersPushed) -> None:
        if not self.newest_version < event.version <= self.manager.buffers.next_version:
            raise InvalidRequestError(
                f"version {event.version} was pushed after version {self.newest_version}; the "
                f"latest batch leads to version {self.manager.buffers.next_version}: push versions "
                "in the order of training"
            )
        self.newest_version = event.version

    def _on_joined(self, event: InstanceJoined) -> None:
        if event.instance in self.assignments.instances:
            raise ConflictError(
                f"instance {event.instance} has joined already: report its loss first"
            )
        self._check_version(event.version)
        self.assignments.expected.joined(
            event.instance,
            event.version,
            event.kv_budget,
            event.gpus,
            is_with_trainer=event.is_with_trainer,
        )

    def _on_lost(self, event: InstanceLost) -> None:
        if event.instance in self.assignments.instances:
            self.assignments.lost(event.instance)
            self.freed.lost(event.instance)

    def _on_chosen(self, event: InstancesChosen) -> None:
        instances = self.assignments.instances
        unknown = [instance for instance in event.drained if instance not in instances]
        if unknown or not event.deployments:
            raise InvalidRequestError(
                f"instances {unknown} have not joined, and {len(event.deployments)} deployments "
                "are to generate: drain joined instances, and leave one deployment or more"
            )
        for instance in event.drained:
            instances[instance].is_draining = True
            self.freed.lost(instance)

    def _drop(self, group: SampleGroupId, reason: str) -> list[RolloutCommand]:
        """Drops a group, and the groups that become surplus by that."""
        surplus: tuple[SampleGroupId, ...] = ()
        if self.manager.buffers.place(group) is not None:
            surplus = self.manager.drop(group)
        commands = self._forget(group, reason)
        for each in surplus:
            commands += self._end_surplus(each)
        return commands + self._train_if_ready()

    def _end_surplus(self, group: SampleGroupId) -> list[RolloutCommand]:
        """A full batch does not need the group, which has no entry any more."""
        if self.settings.staleness.is_speculative:
            return self._queue(group)
        return self._forget(group, "surplus of a full batch")

    def _queue(self, group: SampleGroupId) -> list[RolloutCommand]:
        """Aborts a group that has no entry any more; it begins anew in a later round."""
        commands = self.assignments.abort(list(self.trajectories.members(group)))
        self.rounds.abort(group, self.trajectories.groups[group].prompt_tokens)
        self.trajectories.forget_group(group)
        return [*commands, ReportQueuedGroup(group=group)]

    def _forget(self, group: SampleGroupId, reason: str) -> list[RolloutCommand]:
        """Aborts a group that has no entry any more."""
        commands = self.assignments.abort(list(self.trajectories.members(group)))
        self.trajectories.forget_group(group)
        return [*commands, ReportDroppedGroup(group=group, reason=reason)]

    def _train_if_ready(self) -> list[RolloutCommand]:
        if not self._is_trainer_free or not self.manager.is_ready():
            return []
        self._is_trainer_free = False
        version = self.manager.buffers.next_version
        groups = [
            self.trajectories.consume(group, members)
            for group, members in self.manager.consume().items()
        ]
        self.freed.begin_round()
        if self.settings.staleness.is_speculative:
            self.rounds.put_back(self.trajectories, self.manager.buffers)
            self.rounds.trained([_seen(group) for group in groups])
            self.rounds.begin(self._round_setting())
        batch = tuple(TrainedTrajectory.of(record) for group in groups for record in group)
        return [Train(version=version, batch=batch)]

    def _round_setting(self) -> RoundSetting:
        sizes, instances = self.settings.staleness, self.assignments.instances.values()
        return RoundSetting(
            model=self._fit.model,
            kv_budgets=[each.kv_budget for each in instances if not each.is_draining],
            batch_groups=sizes.batch_groups,
            group_size=sizes.group_size,
        )

    def _check_version(self, version: int) -> None:
        if not 0 <= version <= self.newest_version:
            raise InvalidRequestError(
                f"an instance has version {version}; the parameter server serves "
                f"{self.newest_version}: report a version that was pushed"
            )

    def _held(self, trajectory: TrajectoryId) -> Trajectory:
        record = self.trajectories.get(trajectory)
        assert record is not None, "the coordinator names trajectories that it holds"
        return record

    def _record(self, trajectory: TrajectoryId, instance: InstanceId) -> Trajectory | None:
        """The record, if this instance has the trajectory."""
        record = self.trajectories.get(trajectory)
        return record if record is not None and record.instance == instance else None

    def check_invariants(self) -> None:
        """Raises InvariantError: an invariant of the coordinator or of its parts does not hold."""
        self.manager.check_invariants()
        self.trajectories.check_invariants()
        self.rounds.check_invariants(self.trajectories)
        self.assignments.check_invariants()
        self.freed.check_invariants(self.trajectories, self.assignments.instances)
        for _, buffer in self.manager.buffers.entries():
            for group in (*buffer.reserved, *buffer.occupied):
                if group not in self.trajectories.groups:
                    raise InvariantError(f"group {group} is not held", law="entries are held")


def _seen(members: Sequence[Trajectory]) -> SeenPrompt:
    """A trained prompt."""
    prompt = members[0].prompt_tokens
    return SeenPrompt(prompt, tuple(each.length - prompt for each in members))
