"""The steps that follow an event: due timers, placements, groups to decide on, ended cycles.

Each step has a name, and so has the event itself. A step that raises is a fault of the scheduler,
never a refusal: the state has changed by then. `Fault` names the step, so that a replay of the
event on a sound state can leave out that step and do the others.
"""

from typing import Final

from plexrl.ids import DeploymentId, GroupId, JobId, NodeId, OperationId
from plexrl.scheduler.accounting.retention import forget_ended
from plexrl.scheduler.admission.awaited_profiles import look_for_profile
from plexrl.scheduler.core.cycles import cycle_over
from plexrl.scheduler.core.placing import place_waiting
from plexrl.scheduler.dispatch.group_step import GroupStep
from plexrl.scheduler.dispatch.settled_groups import is_settled
from plexrl.scheduler.jobs.lifecycle import detach_or_cancel, launch_if_due, restart
from plexrl.scheduler.operations.deadlines.cancellation import deadline_passed
from plexrl.scheduler.operations.deadlines.overdue import find_overrun
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.recovery.deadlocks import break_deadlocks
from plexrl.scheduler.recovery.evacuation import reconcile_node
from plexrl.scheduler.recovery.preemption import preempt_detached
from plexrl.scheduler.recovery.relocation import send_migration
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages.timers import Subject, TimerKind
from plexrl.scheduler.state.records import State

EVENT: Final = "event"
"""Name of the step that handles the event itself."""

GIVING_WAY: Final = "giving way"
PLACEMENT: Final = "placement"

NONE: Final[frozenset[str]] = frozenset()

STEPS_MIN: Final = 1000
STEPS_EACH: Final = 50
"""An event may cause `STEPS_MIN` steps, and `STEPS_EACH` more for each group and deployment. In
random histories with faults, no event needs a tenth of that."""


class Fault(Exception):
    """A step of an event failed. The core's state must not be used any more."""

    def __init__(self, step: str, error: Exception) -> None:
        super().__init__(step)
        self.step = step
        self.error = error
        """What the step raised; compiled code keeps no `__cause__`."""


class EndlessStepsError(Exception):
    """The steps of an event cause each other without end: a fault of the scheduler."""


class _Steps:
    """The steps of one event: which one runs, and how many there were."""

    __slots__ = ("_count", "_kind", "_repeated", "_skipped", "_state", "_subject")

    def __init__(self, state: State, skipped: frozenset[str]) -> None:
        self._state, self._skipped = state, skipped
        self._count = 0
        self._kind = ""
        self._subject: object = ""
        self._repeated: dict[str, int] | None = None

    @property
    def current(self) -> str:
        """The name of the step that runs."""
        return f"{self._kind} {self._subject}".rstrip()

    def name(self, kind: str, subject: object) -> bool:
        """Name the next step. False: it must be skipped."""
        self._kind, self._subject = kind, subject
        return not self._skipped or self.current not in self._skipped

    def begin(self, kind: str, subject: str = "") -> bool:
        """Name and count the next step. False: it must be skipped.

        Raises:
            EndlessStepsError: there were too many; `current` is the step that was most frequent.
        """
        self._kind, self._subject = kind, subject
        if self._skipped and self.current in self._skipped:
            return False
        self._count += 1
        if self._count > STEPS_MIN:
            self._check_bound()
        return True

    def _check_bound(self) -> None:
        if self._repeated is None:
            self._repeated = {}
        repeated, current = self._repeated, self.current
        repeated[current] = repeated.get(current, 0) + 1
        state = self._state
        bound = STEPS_MIN + STEPS_EACH * (len(state.groups) + len(state.deployments))
        if self._count > bound:
            most = max(repeated, key=lambda each: repeated[each])
            self._kind, self._subject = most, ""
            raise EndlessStepsError(
                f"an event caused {self._count} steps, {repeated[most]} of them {most!r}; at most "
                f"{bound} are expected of {len(state.groups)} groups and {len(state.deployments)} "
                "deployments"
            )


def work_off(context: Context, now: float, skipped: frozenset[str]) -> None:
    """Do all steps that follow an event, except those named in `skipped`.

    Raises:
        Fault: a step failed, or the steps have no end.
    """
    state, cluster, effects = context.state, context.cluster, context.effects
    dirty, timers, waiting = effects.dirty, effects.timers, cluster.queues.waiting
    detached = cluster.holdings.detached
    is_due = bool(timers) and timers[0][0] <= now
    if not (dirty or is_due or _has_steps(context) or (detached and waiting)) and (
        len(state.ended) <= state.ended_jobs
    ):
        return
    steps = _Steps(state, skipped)
    try:
        if is_due:
            for what in effects.due(now):
                # Not counted: thousands may be due at once, and each only once.
                if steps.name("timer", what):
                    _look_again(context, what, now)
        while True:
            if waiting.must_retry or waiting.newcomers:
                _place(context, steps, now)
            if dirty:
                _advance_groups(context, steps, now)
            if effects.cycles_over:
                _end_cycles(context, steps, now)
            if dirty or waiting.must_retry or waiting.newcomers:
                continue
            if not (detached and waiting and _preempt(context, steps, now)):
                break
        if len(state.ended) > state.ended_jobs and steps.begin("forgetting"):
            forget_ended(context)
    except MemoryError:
        raise
    except Exception as error:
        raise Fault(steps.current, error) from error


def _has_steps(context: Context) -> bool:
    effects, waiting = context.effects, context.cluster.queues.waiting
    return bool(effects.dirty or effects.cycles_over or waiting.must_retry or waiting.newcomers)


def _preempt(context: Context, steps: _Steps, now: float) -> bool:
    """Whether a detached job gave its GPUs away, which leaves more steps."""
    return steps.begin(GIVING_WAY) and preempt_detached(context, now)


def _place(context: Context, steps: _Steps, now: float) -> None:
    if steps.begin(PLACEMENT):
        place_waiting(context, now)
        break_deadlocks(context, now)
    else:
        # They are considered again with all others.
        context.cluster.queues.waiting.take_newcomers()


def _advance_groups(context: Context, steps: _Steps, now: float) -> None:
    dirty, groups = context.effects.dirty, context.state.groups
    while dirty:
        touched = next(iter(dirty))
        del dirty[touched]
        group = groups.get(touched)
        if group is None or is_settled(context, group):
            continue
        if steps.begin("group", touched):
            GroupStep(context, group, now).advance()


def _end_cycles(context: Context, steps: _Steps, now: float) -> None:
    cycles_over, deployments = context.effects.cycles_over, context.state.deployments
    while cycles_over:
        deployment = deployments[next(iter(cycles_over))]
        del cycles_over[deployment.deployment]
        if steps.begin("cycle", deployment.deployment):
            cycle_over(context, deployment, now)


def has_work(context: Context) -> bool:
    """Whether an event has caused commands or steps. A refused event must cause none."""
    return bool(context.effects.commands or context.effects.discards) or _has_steps(context)


def _look_again(context: Context, what: Subject, now: float) -> None:
    state, effects = context.state, context.effects
    kind, name = what
    match kind:
        case TimerKind.GROUP:
            effects.touch(GroupId(name))
        case TimerKind.DEADLINE:
            deadline_passed(context.step(now), OperationId(name))
        case TimerKind.PLACEMENT | TimerKind.ADMISSION:
            context.cluster.queues.waiting.retry_all_if_any()
        case TimerKind.PROFILE:
            look_for_profile(context, DeploymentId(name), now)
        case TimerKind.OVERDUE:
            found = find_overrun(context.step(now), DeploymentId(name))
            if found is not None:
                restart(context, found.deployment, found.reason, now, counts=found.counts)
        case TimerKind.NODE if name in state.nodes:
            reconcile_node(context, NodeId(name), now)
        case TimerKind.LAUNCH if name in state.deployments:
            launch_if_due(context.step(now), state.deployment(DeploymentId(name)))
        case TimerKind.MIGRATION:
            deployment = state.deployments.get(DeploymentId(name))
            if deployment is not None and deployment.wpg.state == WpgState.MIGRATING:
                send_migration(context.step(now), deployment)
        case TimerKind.JOB if (job := state.jobs.get(JobId(name))) is not None:
            detach_or_cancel(context, job, now)
