"""One job of a trace under way: its cycles, serial rollouts and serial training, and the clock it
would have on a group of its own. Pure.

Cycle k trains on rollout k, and rollout k needs the weights of step k - 1 - staleness (PlexRL
§6.3). What does not overlap is serial; from an answer to the next submission the controller takes
its time. The clock of the job alone runs by the same rules, on the same draws, with nobody to wait
for.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

from plexrl.ids import DeploymentId, JobId, OperationId
from plexrl.scheduler.state.demand import DemandTrace, Segment
from plexrl.sim.workload.cycles import Cycles, DrawnCycle
from plexrl.sim.workload.scenario import Behaviour
from plexrl.traces import TraceJob
from plexrl.traces.generate.published import cycles_in
from plexrl.wire.operations import MUTATING, OperationKind

if TYPE_CHECKING:
    from plexrl.scheduler.state.commands import RunOperation
    from plexrl.sim.metrics.collector import RunKind
    from plexrl.sim.state.statemanagers import Refusal
    from plexrl.sim.state.virtual_state import Move

KINDS = {"update": OperationKind.FORWARD_BACKWARD}
"""Of a cycle's segments by their function; others are forward passes, and the last one of a cycle
is its optimizer step."""


_OPTIM_STEP: Final = OperationKind.OPTIM_STEP


class Step(NamedTuple):
    """One operation of a cycle."""

    kind: OperationKind
    work_s: float
    gap_s: float
    """Idle before it."""


class AloneClock:
    """When the job would have ended each cycle on a group of its own."""

    def __init__(
        self,
        *,
        staleness: int,
        controller_s: float,
        launch_s: float,
        load_s: float,
        snapshot_s: float,
        snapshots_after: int,
        snapshots_after_s: float,
    ) -> None:
        self.now = 0.0
        """End of the last cycle, from the job's first placement."""
        self._controller_s = controller_s
        self._load_s = load_s
        self._snapshot_s = snapshot_s
        self._snapshots_after = snapshots_after
        self._snapshots_after_s = snapshots_after_s
        self._logged = 0
        self._logged_s = 0.0
        self._is_first = True
        self._rolled_at = launch_s
        self._staleness = staleness
        self._ends: list[float] = []
        """Of the newest cycles: the oldest is what the next rollout waits for."""

    def cycle(self, rollout_s: float, steps: tuple[Step, ...], speed: float) -> float:
        """Let one cycle pass; returns how long it took, from the end of the one before."""
        ends, controller_s = self._ends, self._controller_s
        rolled_at = self._rolled_at
        if len(ends) > self._staleness:
            free_at = ends.pop(0) + controller_s
            if free_at > rolled_at:
                rolled_at = free_at
        rolled_at += rollout_s
        self._rolled_at = rolled_at
        before = self.now
        # Its processes start before the first rollout; its state is loaded for the first step.
        if self._is_first:
            at = rolled_at + self._load_s
            self._is_first = False
        else:
            at = max(rolled_at, before + controller_s)
        is_first = True
        for kind, work_s, gap_s in steps:
            if not is_first:
                at += gap_s if gap_s > controller_s else controller_s
            is_first = False
            if self._logged >= self._snapshots_after or self._logged_s >= self._snapshots_after_s:
                at += self._snapshot_s
                self._logged, self._logged_s = 0, 0.0
            took_s = work_s / speed
            if kind in MUTATING:
                self._logged += 1
                self._logged_s += took_s
            at += took_s
        ends.append(at)
        self.now = at
        return at - before


class JobRun:
    """A job from its submission to its end. Times are of the simulation's clock."""

    def __init__(
        self,
        trace: TraceJob,
        name: str,
        law: Cycles,
        *,
        staleness: int,
        state_bytes: int,
    ) -> None:
        self.trace = trace
        self.job_id = trace.job_id
        self.law = law
        self.job = JobId(name)
        self.deployment = DeploymentId(name)
        self.gpus = trace.gpus
        self.state_bytes = state_bytes
        self.staleness = staleness
        self.kinds = (*map(kind_of, law.functions[:-1]), OperationKind.OPTIM_STEP)
        self.cycles = cycles_of(trace)
        self.alone: AloneClock | None = None
        """Absent until the job is placed, for its pace depends on its node type."""
        self.placed_at: float | None = None
        self.group: str = ""
        """Empty while it has none."""
        self.node_type = ""
        self.speed = 1.0
        self.incarnation = 0
        self.rolled = 0
        """Rollouts that are over."""
        self.rolling = False
        self.trained = 0
        """Cycles that are over."""
        self.worked_s = 0.0
        """Of these, on its GPUs; what failures made necessary not counted."""
        self.training = False
        self.answered_at = 0.0
        """When the controller can next submit, after its last answer."""
        self.cycle_began_at = 0.0
        self.draws: list[DrawnCycle] = []
        """Of rollouts that are over or under way, and not trained on."""
        self.steps: tuple[Step, ...] = ()
        """Of the cycle that trains."""
        self.step = 0
        self.tokens = 0
        self.operation = OperationId("")
        self.run: RunOperation | None = None
        """What the WPG is at."""
        self.run_kind: RunKind = "run"
        self.move: Move | Refusal | None = None
        """Of its state, where it is at that."""
        self.run_began_at = 0.0
        self.run_s = 0.0

    @property
    def may_roll(self) -> bool:
        """The next rollout has the weights that it needs."""
        return (
            not self.rolling
            and self.rolled < self.cycles
            and self.rolled <= self.trained + self.staleness
        )

    @property
    def may_train(self) -> bool:
        """There is a rollout to train on, and nothing that trains."""
        return not self.training and self.rolled > self.trained

    def begin_rollout(self) -> float:
        """Draw the next cycle; returns the seconds of its rollout."""
        self.rolling = True
        drawn = self.law.draw(self.rolled)
        self.draws.append(drawn)
        return drawn.rollout_s

    def begin_cycle(self) -> None:
        """Train on the oldest rollout."""
        drawn = self.draws[0]
        self.training = True
        self.steps = self.steps_of(drawn)
        self.tokens = drawn.tokens
        self.step = 0

    def end_cycle(self) -> float:
        """The cycle's last operation is over; returns what it would have taken alone."""
        assert self.alone is not None, f"{self.job} trains on no GPUs"
        drawn = self.draws.pop(0)
        self.training = False
        self.trained += 1
        worked_s = 0.0
        for _, work_s, _ in self.steps:
            worked_s += work_s
        self.worked_s += worked_s / self.speed
        return self.alone.cycle(drawn.rollout_s, self.steps, self.speed)

    def steps_of(self, drawn: DrawnCycle) -> tuple[Step, ...]:
        """The operations of a cycle."""
        works = drawn.segments_s
        if len(works) == 1:
            return (Step(_OPTIM_STEP, works[0], 0.0),)
        return tuple(map(Step, self.kinds, works, (0.0, *drawn.gaps_s)))

    def step_named(self, operation: str) -> Step:
        """The step of any cycle, by its operation's name: for one that is repeated."""
        cycle, index = operation.rsplit(":", 2)[1:]
        return self.steps_of(self.law.draw(int(cycle)))[int(index)]


def kind_of(function: str) -> OperationKind:
    """What segments are that come before the last of a cycle; of several in one, the last says."""
    return KINDS.get(function.rsplit("+", 1)[-1], OperationKind.FORWARD)


def cycles_of(job: TraceJob) -> int:
    """How many cycles the job runs; one that has no profile is one long cycle."""
    if job.period_s is None:
        return 1
    return cycles_in(job.service_s, job.period_s) if job.cycles is None else job.cycles


def demand_of(job: TraceJob, behaviour: Behaviour) -> DemandTrace | None:
    """What a job that is known declares, as the scheduler's profiler would have measured it: from
    the first operation of a cycle. None where it needs its GPUs at no time. Where rollouts run
    ahead of training, a cycle is as long as the longer of the two, and training can be late by the
    difference."""
    period_s = job.service_s if job.period_s is None else job.period_s
    staleness = job.staleness if behaviour.staleness is None else behaviour.staleness
    jitter_s = job.jitter_s if behaviour.jitter is None else behaviour.jitter * period_s
    if not job.segments:
        whole = Segment(offset_s=0.0, duration_s=period_s)
        return DemandTrace(period_s=period_s, segments=(whole,), jitter_s=jitter_s)
    first_s = job.segments[0].offset_s
    span_s = job.segments[-1].offset_s + job.segments[-1].duration_s - first_s
    slack_s = 0.0
    if staleness:
        rollout_s = period_s - span_s
        period_s = max(rollout_s, span_s, 1e-3)
        slack_s = period_s - span_s
    segments: list[Segment] = []
    end_s = 0.0
    for segment in job.segments:
        offset_s = max(end_s, segment.offset_s - first_s)
        duration_s = min(segment.duration_s, period_s - offset_s)
        if duration_s > 0.0:
            slack = max(slack_s, segment.slack_s)
            segments.append(Segment(offset_s=offset_s, duration_s=duration_s, slack_s=slack))
            end_s = offset_s + duration_s
    if not segments:
        return None
    return DemandTrace(period_s=period_s, segments=tuple(segments), jitter_s=jitter_s)
