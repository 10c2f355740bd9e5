"""The state of one running job: its rollouts, its training, and its clock without other jobs. Pure.

Cycle k trains on rollout k, and rollout k needs the weights of step k - 1 - staleness (PlexRL
§6.3). Rollouts are serial, and so is training. The controller needs some time between an answer and
the next submission. `AloneClock` follows the same rules on the same draws, without any waiting.

A job has two such clocks. `alone` counts the first load and the snapshots that a job has on GPUs of
its own. `least` counts no moves of state: a scheduler can load ahead of time, and each switch away
makes a version that a snapshot would have made. No schedule beats `least`.
"""

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from plexrl.ids import DeploymentId, JobId, OperationId
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.sim.workload.cycles import CycleSource, DrawnCycle
from plexrl.sim.workload.scenario import Behaviour, Scenario
from plexrl.traces import TraceJob
from plexrl.traces.generate.published import STATE_BYTES_PER_PARAMETER, cycles_in
from plexrl.wire.operations import MUTATING, OperationKind

if TYPE_CHECKING:
    from plexrl.scheduler.rules.config import SchedulerConfig
    from plexrl.sim.engine.statemanagers import Refusal
    from plexrl.sim.metrics.collector import RunKind
    from plexrl.sim.state.move_costs import MoveCosts
    from plexrl.sim.state.virtual_state import Move
    from plexrl.wire.messages import Run

KINDS = {"update": OperationKind.FORWARD_BACKWARD}
"""Operation kind by segment function; other segments are forward passes, and the last segment of a
cycle is its optimizer step."""

WEIGHTS_PART = 2 / STATE_BYTES_PER_PARAMETER
"""Part of a training state that rollouts load: the bf16 weights."""

_OPTIM_STEP: Final = OperationKind.OPTIM_STEP


class Step(NamedTuple):
    """One operation of a cycle."""

    kind: OperationKind
    work_s: float
    gap_s: float
    """Idle time before the step."""


class AloneClock:
    """The end of each cycle if the job had a group of its own."""

    def __init__(
        self,
        *,
        staleness: int,
        controller_s: float,
        launch_s: float,
        load_s: float = 0.0,
        rollout_load_s: float = 0.0,
        snapshot_s: float = 0.0,
        snapshots_after: int = 1,
        snapshots_after_s: float = math.inf,
    ) -> None:
        """Without the optional arguments no move of state takes time."""
        self.now = 0.0
        """End of the last cycle, in seconds from the job's first placement."""
        self._controller_s = controller_s
        self._load_s = load_s
        self._snapshot_s = snapshot_s
        self._snapshots_after = snapshots_after
        self._snapshots_after_s = snapshots_after_s
        self._logged = 0
        self._logged_s = 0.0
        self._is_first = True
        self._rolled_at = launch_s + rollout_load_s
        self._staleness = staleness
        self._ends: list[float] = []
        """Ends of the newest cycles; the next rollout waits for the oldest."""

    def cycle(self, rollout_s: float, steps: tuple[Step, ...], speed: float) -> float:
        """Advance by one cycle; returns the seconds since the end of the cycle before."""
        ends, controller_s = self._ends, self._controller_s
        rolled_at = self._rolled_at
        if len(ends) > self._staleness:
            free_at = ends.pop(0) + controller_s
            if free_at > rolled_at:
                rolled_at = free_at
        rolled_at += rollout_s
        self._rolled_at = rolled_at
        before = self.now
        # Processes start before the first rollout; state is loaded before the first step.
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


class WorkerGroup:
    """The workers of one deployment of a job."""

    def __init__(self, name: str, gpus: int, state_bytes: int) -> None:
        self.deployment = DeploymentId(name)
        self.gpus = gpus
        self.state_bytes = state_bytes
        self.group: str = ""
        """Empty while the deployment is not placed."""
        self.held: tuple[tuple[str, int], ...] = ()
        """Its GPUs: node and index of each."""
        self.rollout_part = 0.0
        """The part of its GPUs that rollouts took first."""
        self.incarnation = 0
        self.run: Run | None = None
        """The command that the WPG executes."""
        self.run_kind: RunKind = "run"
        self.move: Move | Refusal | None = None
        """The move in execution, if the command is a load, an offload or a snapshot."""
        self.run_began_at = 0.0
        self.run_s = 0.0


class RolloutWorkers(WorkerGroup):
    """The rollout deployment of a job whose rollouts run on GPUs of the cluster."""

    def __init__(self, owner: "JobRun") -> None:
        state_bytes = max(1, round(WEIGHTS_PART * owner.state_bytes))
        super().__init__(f"{owner.job}:rollout", owner.trace.rollout_gpus, state_bytes)
        self.owner = owner

    def operation(self) -> OperationId:
        """The operation of the job's next rollout."""
        return OperationId(f"{self.deployment}:{self.owner.rolled}")

    def seconds(self, operation: str) -> float:
        """Duration of an operation that `operation()` has named."""
        return self.owner.cycle_source.draw(int(operation.rsplit(":", 1)[1])).rollout_s


class Filler(WorkerGroup):
    """A preemptible deployment, the only one of its job."""

    def __init__(self, number: int, gpus: int, state_bytes: int) -> None:
        super().__init__(f"filler{number}:batch", gpus, state_bytes)
        self.job = JobId(f"filler{number}")


class JobRun(WorkerGroup):
    """A job from its submission to its end, with the workers that train. Times are on the virtual
    clock."""

    def __init__(
        self,
        trace: TraceJob,
        name: str,
        cycle_source: CycleSource,
        *,
        staleness: int,
        state_bytes: int,
    ) -> None:
        super().__init__(name, trace.gpus, state_bytes)
        self.trace = trace
        self.job_id = trace.job_id
        self.cycle_source = cycle_source
        self.job = JobId(name)
        self.rollouts: RolloutWorkers | None = None
        """Absent if rollouts run outside of the cluster."""
        self.staleness = staleness
        self.kinds = (*map(kind_of, cycle_source.functions[:-1]), OperationKind.OPTIM_STEP)
        self.cycles = cycles_of(trace)
        self.alone: AloneClock | None = None
        """Absent until the job is placed: its speed depends on the node type."""
        self.least: AloneClock | None = None
        """The same without moves of its state."""
        self.placed_at: float | None = None
        self.node_type = ""
        self.speed = 1.0
        self.speed_max = 1.0
        """Highest speed since the cycle in training began."""
        self.rolled = 0
        """Completed rollouts."""
        self.rolling = False
        self.trained = 0
        """Cycles that are over."""
        self.worked_s = 0.0
        """Training seconds of the completed cycles, without work repeated after failures."""
        self.rolled_s = 0.0
        """Seconds of their rollouts."""
        self.training = False
        self.answered_at = 0.0
        """When the controller can submit again after the last answer."""
        self.cycle_began_at = 0.0
        self.draws: list[DrawnCycle] = []
        """Draws of rollouts that have begun and are not yet trained on."""
        self.steps: tuple[Step, ...] = ()
        """Steps of the cycle in training."""
        self.step = 0
        self.tokens = 0
        self.operation = OperationId("")

    @property
    def owner(self) -> "JobRun":
        """The job: itself, as for `RolloutWorkers`."""
        # A property, because a job that is a cycle of references is not freed when it ends.
        return self

    @property
    def may_roll(self) -> bool:
        """Whether the next rollout has the weights that it needs."""
        return (
            not self.rolling
            and self.rolled < self.cycles
            and self.rolled <= self.trained + self.staleness
        )

    @property
    def may_train(self) -> bool:
        """Whether a rollout is ready to train on and the job is not training."""
        return not self.training and self.rolled > self.trained

    def begin_rollout(self) -> float:
        """Draw the next cycle; returns the duration of its rollout."""
        self.rolling = True
        drawn = self.cycle_source.draw(self.rolled)
        self.draws.append(drawn)
        return drawn.rollout_s

    def begin_cycle(self) -> None:
        """Begin to train on the oldest rollout."""
        drawn = self.draws[0]
        self.training = True
        self.steps = self.steps_of(drawn)
        self.tokens = drawn.tokens
        self.step = 0

    def end_cycle(self) -> tuple[float, float]:
        """Complete the cycle; returns its duration on a group of the job's own, with the moves of
        its state and without."""
        assert self.alone is not None, f"{self.job} trains on no GPUs"
        assert self.least is not None
        drawn = self.draws.pop(0)
        self.training = False
        self.trained += 1
        worked_s = 0.0
        for _, work_s, _ in self.steps:
            worked_s += work_s
        self.worked_s += worked_s / self.speed
        self.rolled_s += drawn.rollout_s
        speed, self.speed_max = self.speed_max, self.speed
        return (
            self.alone.cycle(drawn.rollout_s, self.steps, speed),
            self.least.cycle(drawn.rollout_s, self.steps, speed),
        )

    def start_clocks(
        self, scenario: Scenario, costs: "MoveCosts", config: "SchedulerConfig"
    ) -> None:
        """Start both clocks; the kind of nodes is known."""
        self.alone = alone_clock(self, scenario, costs, config)
        self.least = AloneClock(
            staleness=self.staleness,
            controller_s=scenario.behaviour.controller_s,
            launch_s=scenario.launch_s,
        )

    def steps_of(self, drawn: DrawnCycle) -> tuple[Step, ...]:
        """The operations of a cycle."""
        works = drawn.segments_s
        if len(works) == 1:
            return (Step(_OPTIM_STEP, works[0], 0.0),)
        return tuple(map(Step, self.kinds, works, (0.0, *drawn.gaps_s)))

    def step_named(self, operation: str) -> Step:
        """The step of an operation of an earlier cycle that is repeated."""
        cycle, index = operation.rsplit(":", 2)[1:]
        return self.steps_of(self.cycle_source.draw(int(cycle)))[int(index)]


Workers = JobRun | RolloutWorkers
"""Workers of any deployment."""


def alone_clock(
    run: JobRun, scenario: Scenario, costs: "MoveCosts", config: "SchedulerConfig"
) -> AloneClock:
    """The clock of a job on its kind of nodes."""
    rollout_load_s = 0.0
    if (rollouts := run.rollouts) is not None:
        rollout_load_s = costs.load_s(run.node_type, rollouts.state_bytes, rollouts.gpus)
    where = (run.node_type, run.state_bytes, run.gpus)
    return AloneClock(
        staleness=run.staleness,
        controller_s=scenario.behaviour.controller_s,
        launch_s=scenario.launch_s,
        load_s=costs.load_s(*where),
        rollout_load_s=rollout_load_s,
        snapshot_s=costs.offload_s(*where),
        snapshots_after=config.snapshot_operations,
        snapshots_after_s=config.snapshot_work_s,
    )


def kind_of(function: str) -> OperationKind:
    """Operation kind of a segment before the last; the last function of a merged one decides."""
    return KINDS.get(function.rsplit("+", 1)[-1], OperationKind.FORWARD)


def cycles_of(job: TraceJob) -> int:
    """Number of cycles; a job without a profile is one long cycle."""
    if job.period_s is None:
        return 1
    return cycles_in(job.service_s, job.period_s) if job.cycles is None else job.cycles


def behaviour_staleness(job: TraceJob, behaviour: Behaviour) -> int:
    """Steps by which the rollouts of a job may run ahead."""
    return job.staleness if behaviour.staleness is None else behaviour.staleness


def rollout_demand_of(job: TraceJob, behaviour: Behaviour) -> DemandTrace | None:
    """The demand of a job's rollouts if they share GPUs: what its training leaves of the period.
    None if there is no such rest."""
    trains = demand_of(job, behaviour)
    if trains is None or not job.segments or job.period_s is None:
        return None
    first, last = job.segments[0], job.segments[-1]
    rollout_s = job.period_s - (last.offset_s + last.duration_s - first.offset_s)
    rollout_s = min(rollout_s, trains.period_s)
    if rollout_s <= 0.0:
        return None
    slack_s = trains.period_s - rollout_s if behaviour_staleness(job, behaviour) else 0.0
    segment = Segment(offset_s=0.0, duration_s=rollout_s, slack_s=slack_s)
    return DemandTrace(period_s=trains.period_s, segments=(segment,), jitter_s=trains.jitter_s)


def demand_of(job: TraceJob, behaviour: Behaviour) -> DemandTrace | None:
    """The demand that a job declares, as the scheduler's profiler would measure it: from the first
    operation of a cycle. None if the job never needs its GPUs. If rollouts run ahead of training,
    the period is the longer of the two, and the difference is slack."""
    period_s = job.service_s if job.period_s is None else job.period_s
    staleness = behaviour_staleness(job, behaviour)
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
