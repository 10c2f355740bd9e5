"""Compares simulated cycles with the cycles of a live cluster on the same jobs. Pure.

There are two predictions; neither uses the measured durations of shared cycles:

- *recorded cycles* (*replay* in the docs): the simulator runs each recorded cycle's own seconds
  (`plexrl.sim.fidelity.recording`) and adds the waiting. Compared cycle by cycle.
- *drawn cycles* (*law*): the recorder's rows of the run (a profile with its jitter, without
  waiting) are simulated as any trace. Compared by each job's median cycle.

Both use a linear cost model of moves, fitted to the recorded moves. The baseline predicts that no
job waits.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.rules.switch_cost import HOST
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.fidelity.errors import Errors, errors_of
from plexrl.sim.fidelity.planning import Planning
from plexrl.sim.fidelity.recording import RecordedJob
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.cycles import CycleDistribution, CycleFactory, DrawnCycle
from plexrl.sim.workload.scenario import Behaviour, Detail, NodeType, Pool, Scenario
from plexrl.traces import TraceJob

WARM_UP_CYCLES = 3
"""First cycles of each job that are run and not compared: the live scheduler profiles the job."""

Seconds = Mapping[str, Sequence[float]]
"""Cycle durations by job, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleError:
    """Measured and predicted duration of one cycle."""

    job: str
    number: int
    measured_s: float
    predicted_s: float
    alone_s: float
    """Duration without any waiting."""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted_s / self.measured_s - 1.0)

    @property
    def alone_error(self) -> float:
        """Relative error of predicting no waiting."""
        return abs(self.alone_s / self.measured_s - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobError:
    """Measured and predicted median cycle of one job."""

    job: str
    cycles: int
    measured_s: float
    predicted_s: float
    alone_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive if it is too long."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Predicted and measured cycles of one run."""

    cycles: tuple[CycleError, ...]
    jobs: tuple[JobError, ...]

    @property
    def errors(self) -> Errors:
        """Errors over all cycles."""
        return errors_of([cycle.error for cycle in self.cycles])

    @property
    def alone_errors(self) -> Errors:
        """Errors of predicting no waiting."""
        return errors_of([cycle.alone_error for cycle in self.cycles])


def compare(
    measured: Seconds, predicted: Seconds, alone: Seconds, *, warm_up: int = WARM_UP_CYCLES
) -> Comparison:
    """Compare cycle by cycle, after the first `warm_up` cycles of each job.

    Raises:
        InvalidRequestError: the numbers of cycles differ, or no cycle is left.
    """
    counts = [{job: len(each) for job, each in found.items()} for found in (predicted, alone)]
    wanted = {job: len(each) for job, each in measured.items()}
    if any(count != wanted for count in counts):
        raise InvalidRequestError(
            f"the predictions are not of the measured cycles: {wanted} were measured, "
            f"{counts[0]} predicted"
        )
    if short := [job for job, count in wanted.items() if count <= warm_up]:
        raise InvalidRequestError(
            f"{', '.join(short)} ran no more than the {warm_up} cycles of warm-up: run it longer"
        )
    cycles = tuple(
        CycleError(
            job=job,
            number=number,
            measured_s=measured[job][number],
            predicted_s=predicted[job][number],
            alone_s=alone[job][number],
        )
        for job in sorted(measured)
        for number in range(warm_up, wanted[job])
    )
    jobs = tuple(
        JobError(
            job=job,
            cycles=wanted[job] - warm_up,
            measured_s=median(measured[job][warm_up:]),
            predicted_s=median(predicted[job][warm_up:]),
            alone_s=median(alone[job][warm_up:]),
        )
        for job in sorted(measured)
    )
    return Comparison(cycles=cycles, jobs=jobs)


def compare_recorded(
    jobs: Sequence[RecordedJob], planning: Planning, *, warm_up: int = WARM_UP_CYCLES
) -> Comparison:
    """Predict a run from its recorded cycles under the planning that it ran under, and compare."""
    return compare(
        {job.name: [cycle.took_s for cycle in job.cycles] for job in jobs},
        predict_recorded(jobs, planning),
        {job.name: [cycle.alone_s for cycle in job.cycles] for job in jobs},
        warm_up=warm_up,
    )


def compare_drawn(
    recorded: Sequence[TraceJob],
    jobs: Sequence[RecordedJob],
    planning: Planning,
    seeds: Sequence[int],
    *,
    names: Mapping[str, str],
    warm_up: int = WARM_UP_CYCLES,
) -> tuple[JobError, ...]:
    """Simulate the recorder's rows of a run with drawn cycles, and compare median cycles.

    The prediction is the median over `seeds`. `names`: job names by their ids in the rows.
    """
    rows = [replace(row, job_id=names[row.job_id]) for row in recorded]
    predicted: dict[str, list[float]] = {job.name: [] for job in jobs}
    for seed in seeds:
        trace = [replace(row, submit_s=0.0, duration_s=None) for row in rows]
        took = simulate_cycles(trace, jobs, planning, seed=seed)
        for name, each in took.items():
            predicted[name].append(median(each))
    periods = {row.job_id: row.period_s or 0.0 for row in rows}
    return tuple(
        JobError(
            job=job.name,
            cycles=len(job.cycles) - warm_up,
            measured_s=median(cycle.took_s for cycle in job.cycles[warm_up:]),
            predicted_s=median(predicted[job.name]),
            alone_s=periods[job.name],
        )
        for job in jobs
    )


def predict_recorded(jobs: Sequence[RecordedJob], planning: Planning) -> dict[str, list[float]]:
    """Simulated cycle durations of the recorded cycles, by job."""
    began_at = min(job.began_at for job in jobs)
    recorded = {job.name: RecordedCycles(job) for job in jobs}

    def cycles_of(
        job: TraceJob, behaviour: Behaviour, seed: int, *, detail: Detail
    ) -> RecordedCycles:
        del behaviour, seed, detail
        return recorded[job.job_id]

    trace = [
        TraceJob(
            job_id=job.name,
            submit_s=job.began_at - began_at,
            gpus=job.gpus,
            state_bytes=job.state_bytes,
            cycles=len(job.cycles),
            period_s=max(1e-3, median(cycle.alone_s for cycle in job.cycles)),
        )
        for job in sorted(jobs, key=lambda job: (job.began_at, job.name))
    ]
    return simulate_cycles(trace, jobs, planning, cycle_factory=cycles_of)


class RecordedCycles:
    """Provides a recorded job's cycles.

    Operations that were always queued before the operation ahead of them completed are merged: no
    other job could run between them.
    """

    __slots__ = ("_cycles", "functions")

    def __init__(self, job: RecordedJob) -> None:
        gaps = range(len(job.kinds) - 1)
        queued = [all(cycle.gaps_s[gap] == 0.0 for cycle in job.cycles) for gap in gaps]
        starts = [0, *(gap + 1 for gap in gaps if not queued[gap])]
        parts = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
        self.functions = tuple(_function(job.kinds[part]) for part in parts)
        self._cycles = [
            DrawnCycle(
                cycle.rollout_s,
                tuple(math.fsum(cycle.segments_s[part]) for part in parts),
                tuple(cycle.gaps_s[start - 1] for start in starts[1:]),
                max(1, cycle.tokens),
            )
            for cycle in job.cycles
        ]

    def draw(self, number: int) -> DrawnCycle:
        """The recorded cycle of this number, from 0."""
        return self._cycles[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Cost model of a move: fixed seconds plus seconds per byte on each GPU."""

    fixed_s: float
    byte_s: float

    def seconds(self, nbytes: float) -> float:
        """Duration of a move of `nbytes` per GPU."""
        return self.fixed_s + nbytes * self.byte_s


def fit_linear(points: Sequence[tuple[float, float]]) -> LinearCost:
    """Least-squares line through (bytes, seconds) without negative coefficients."""
    size, took = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - size) ** 2 for x, _ in points)
    slope = sum((x - size) * (y - took) for x, y in points) / spread if spread else 0.0
    # A line with a negative intercept is replaced by the line through 0 and the mean.
    slope = min(max(0.0, slope), took / size if size else 0.0)
    return LinearCost(fixed_s=max(0.0, took - slope * size), byte_s=slope)


class RecordedMoves(MoveCosts):
    """Move costs fitted to the recorded loads and to the recorded offloads."""

    def __init__(self, pools: Sequence[Pool], jobs: Sequence[RecordedJob]) -> None:
        super().__init__(pools)
        self._load = fit_linear([(job.state_bytes / job.gpus, job.load_s) for job in jobs])
        self._offload = fit_linear([(job.state_bytes / job.gpus, job.offload_s) for job in jobs])

    def load_s(self, node_type: str, state_bytes: int, gpus: int, tier: str = HOST) -> float:
        """Load duration from any tier: recorded clusters keep all states in host memory."""
        del node_type, tier
        return self._load.seconds(state_bytes / gpus)

    def offload_s(self, node_type: str, state_bytes: int, gpus: int, tier: str = HOST) -> float:
        """Offload duration to any tier."""
        del node_type, tier
        return self._offload.seconds(state_bytes / gpus)

    def prefetched_part(self, node_type: str, leaving_bytes: float, coming_bytes: float) -> float:
        """0: the mean of recorded loads includes how far they overlapped."""
        del node_type, leaving_bytes, coming_bytes
        return 0.0


def simulate_cycles(
    trace: Sequence[TraceJob],
    jobs: Sequence[RecordedJob],
    planning: Planning,
    *,
    seed: int = 0,
    cycle_factory: CycleFactory = CycleDistribution,
    groups: int = 1,
) -> dict[str, list[float]]:
    """Cycle durations by job on shared groups of the recorded size, without declared demand."""
    gpus = {job.gpus for job in jobs}
    if len(gpus) != 1:
        raise InvalidRequestError(
            f"the jobs have {sorted(gpus)} GPUs: only jobs that shared one group can be predicted"
        )
    pools = (Pool(nodes=groups, node_type=NodeType(name="recorded", gpus=gpus.pop())),)
    took: dict[str, list[float]] = {job.job_id: [] for job in trace}
    scenario = Scenario(
        source=_Rows(tuple(trace)),
        pools=pools,
        seed=seed,
        behaviour=Behaviour(controller_s=0.0),
        detail="operation",
        control_s=median(job.control_s for job in jobs),
        warm=False,
        launch_s=0.0,
    )

    def on_cycle(job: str, seconds: float, alone_s: float) -> None:
        del alone_s
        took[job].append(seconds)

    simulate(
        scenario,
        settings=planning.settings,
        cycle_factory=cycle_factory,
        costs=RecordedMoves(pools, jobs),
        on_cycle=on_cycle,
    )
    return took


@dataclass(frozen=True, slots=True)
class _Rows:
    """A source of jobs in memory."""

    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        return iter(self.rows)


def _function(kinds: Sequence[str]) -> str:
    """Function of the segment that these operations form."""
    return "update" if "forward_backward" in kinds else "+".join(kinds)
