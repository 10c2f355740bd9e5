"""A few jobs of the published classes that share node groups of one GPU, cycle by cycle."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Any

from plexrl.ids import JobId
from plexrl.scheduler.state.demand.estimates import MOVE_BYTES_PER_S
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.sim.workload.scenario import TIB, Behaviour, NodeType, Pool, Scenario
from plexrl.traces import MODEL_CLASSES, TraceJob

NODE = NodeType(name="shared", gpus=1, gpu_memory_bytes=TIB, host_memory_bytes=64 * TIB)
CORRELATION = 0.5
"""Correlation of a cycle's rollout and its training work."""
STEP_EVENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Duration of one cycle in seconds, in the run and on a group without other jobs."""

    took_s: float
    alone_s: float

    @property
    def slowdown(self) -> float:
        """Relative loss to other jobs and to switches."""
        return self.took_s / self.alone_s - 1.0


@dataclass(frozen=True, slots=True)
class Jobs:
    """A source of jobs that are in memory."""

    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        """All jobs, in order of submission."""
        return iter(self.rows)


class SharedGroup:
    """A simulated run of jobs that declare one busy segment per cycle and start staggered.

    Equal names, cycles, sigma and seed give equal drawn cycles under every configuration.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        settings: Mapping[str, Any],
        cycles: int,
        sigma: float = 0.0,
        switch_s: float = 8.0,
        seed: int = 1,
        groups: int = 1,
        controller_s: float = 0.01,
        warm: bool = True,
    ) -> None:
        """`names`: class of each job. `settings`: of the scheduler. `cycles`: of the job with the
        longest cycles; the others run as long."""
        self.cycles: dict[str, list[Cycle]] = {}
        """Completed cycles by job, oldest first."""
        span_s = cycles * max(MODEL_CLASSES[name].period_s for name in names)
        stagger_s = fmean(MODEL_CLASSES[name].period_s for name in names) / len(names)
        rows = tuple(
            _row(name, index, index * stagger_s, sigma, switch_s, span_s)
            for index, name in enumerate(names)
        )
        self.jobs = tuple(row.job_id for row in rows)
        scenario = Scenario(
            source=Jobs(rows),
            pools=(Pool(nodes=groups, node_type=NODE),),
            policy="pack",
            seed=seed,
            behaviour=Behaviour(correlation=CORRELATION, controller_s=controller_s),
            warm=warm,
            launch_s=0.0,
            switch_s=switch_s,
            detail="operation",
        )
        self._run = TraceRun(scenario, settings=settings, on_cycle=self._cycle_ended)
        self._run.start()

    @property
    def slowdowns(self) -> list[float]:
        """Slowdowns of all completed cycles."""
        return [cycle.slowdown for cycles in self.cycles.values() for cycle in cycles]

    @property
    def switches(self) -> int:
        """Context switches so far."""
        core = self._run.shell.core
        return int(core.status(self._run.shell.now)["context_switches"])

    def run(self, cycles: int) -> None:
        """Run until every job has completed so many cycles; the jobs need to have more than that.

        Raises:
            RuntimeError: the run ends before.
        """
        while any(len(self.cycles.get(job, ())) < cycles for job in self.jobs):
            if not self._run.shell.run(STEP_EVENTS):
                raise RuntimeError(f"the run ended before every job had {cycles} cycles")
        self._run.shell.core.check_invariants()

    def explain(self, job: str) -> dict[str, Any]:
        """The scheduler's explanation of the job's deployment."""
        name = JobId(f"j{self.jobs.index(job) + 1}")
        explained = self._run.shell.core.explain_job(name, self._run.shell.now)
        (found,) = explained["deployments"]
        return dict(found)

    def waiting_part(self, job: str, warm_up: int) -> float:
        """Share of the job's time after its first cycles that was lost to waiting, from 0 to 1."""
        counted = self.cycles[job][warm_up:]
        return 1.0 - sum(each.alone_s for each in counted) / sum(each.took_s for each in counted)

    def _cycle_ended(self, job: str, took_s: float, alone_s: float) -> None:
        self.cycles.setdefault(job, []).append(Cycle(took_s=took_s, alone_s=alone_s))


def _row(
    name: str, index: int, submit_s: float, sigma: float, switch_s: float, span_s: float
) -> TraceJob:
    known = MODEL_CLASSES[name]
    rollout_s = known.period_s - known.busy_s
    work_s = known.log_prob_s + known.update_s
    variance = (rollout_s**2 + work_s**2 + 2.0 * CORRELATION * rollout_s * work_s) * sigma**2
    demand = known.demand()
    demand["jitter_s"] = sqrt(variance)
    # From this size the scheduler estimates a switch of `switch_s` before it has measured one.
    demand["state_bytes"] = round(switch_s / 2.0 * MOVE_BYTES_PER_S)
    return TraceJob(
        job_id=f"job{index}",
        submit_s=submit_s,
        gpus=1,
        # A quarter more, so that every job still runs when the slowest has its cycles.
        cycles=round(1.25 * span_s / known.period_s) + 8,
        **demand,
    )
