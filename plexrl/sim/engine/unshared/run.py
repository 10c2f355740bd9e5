"""A run of jobs that never share GPUs, under a rule of `backfilling`.

The scheduler's core has no part in it. A job holds its training GPUs, and those of its rollouts if
they are placed, for as long as its drawn cycles take alone.
"""

from collections.abc import Callable, Iterator

from plexrl.errors import InvalidRequestError
from plexrl.sim.engine.arrival import new_run
from plexrl.sim.engine.shell import virtual_config
from plexrl.sim.engine.unshared.backfilling import RigidJob, Rule, conservative, easy
from plexrl.sim.metrics.collector import COMPLETED, Collector
from plexrl.sim.metrics.job_rows import JobRow
from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.cycles import CycleFactory
from plexrl.sim.workload.job_run import JobRun
from plexrl.sim.workload.policies import UNSHARED
from plexrl.sim.workload.scenario import Scenario
from plexrl.traces import TraceJob

RULES: dict[str, Rule] = dict(zip(UNSHARED, (easy, conservative), strict=True))
"""By the name of a policy."""
SUBMITS, ENDS, STARTS = range(3)
"""Events of one moment are in this order."""


class UnsharedRun:
    """One run."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        cycle_factory: CycleFactory,
        costs: MoveCosts | None = None,
        on_job: Callable[[JobRow], None] | None = None,
    ) -> None:
        """As `TraceRun`.

        Raises:
            InvalidRequestError: the scenario has failures, several pools, a price of on-demand
                nodes, or shared rollouts: such a run counts GPUs, and knows no nodes or groups.
        """
        what = {
            "failures": scenario.failures.node_mtbf_s or scenario.failures.worker_mtbf_s,
            "several pools": len(scenario.pools) > 1,
            "a price of on-demand nodes": scenario.prices.on_demand is not None,
            "idle time to fill": scenario.fills_valleys,
            "shared GPUs of rollouts": scenario.rollouts in ("shared", "automatic"),
            "order by length": scenario.longest_first,
            "mixed sizes": scenario.mixed_sizes,
        }
        if unknown := [name for name, given in what.items() if given]:
            raise InvalidRequestError(
                f"policy {scenario.policy} counts GPUs, and knows no {', '.join(unknown)}: leave "
                "the policy or these out"
            )
        self._scenario = scenario
        self._cycle_factory = cycle_factory
        self._costs = costs or MoveCosts(scenario.pools, scenario.switch_s)
        self._config = virtual_config()
        self._collector = Collector(scenario, on_job)
        self._gpus = scenario.gpus
        self.cycles = 0

    def result(self, speed: Callable[[], Speed]) -> SimResult:
        """Run all jobs; `speed` measures the run when it has ended."""
        jobs = list(self._scenario.source.jobs())
        rigid = [self._rigid(job) for job in jobs]
        fitting = [index for index, each in enumerate(rigid) if each.gpus <= self._gpus]
        rule = RULES[self._scenario.policy]
        starts = rule([rigid[index] for index in fitting], self._gpus)
        events = [(each.submit_s, SUBMITS, index) for index, each in enumerate(rigid)]
        for index, start_s in zip(fitting, starts, strict=True):
            events.append((start_s, STARTS, index))
            events.append((start_s + rigid[index].duration_s, ENDS, index))
        now = 0.0
        for now, kind, index in sorted(events):
            job, collector = jobs[index], self._collector
            if kind == STARTS:
                collector.job_placed(job.job_id, now)
                continue
            if kind == ENDS:
                self._run_job(job, now - rigid[index].duration_s)
                continue
            collector.job_submitted(job, now)
            if rigid[index].gpus > self._gpus:
                collector.job_ended(job.job_id, now, "failed", 0.0)
        return collector.result(now, self.cycles, 0, speed())

    def _rigid(self, job: TraceJob) -> RigidJob:
        run = self._run(job)
        duration_s = sum(took_s for took_s, _ in self._cycles(run))
        rollout_gpus = 0 if run.rollouts is None else run.rollouts.gpus
        return RigidJob(job.submit_s, run.gpus + rollout_gpus, duration_s)

    def _run(self, job: TraceJob) -> JobRun:
        scenario, kind = self._scenario, self._scenario.pools[0].node_type
        run = new_run(job, job.job_id, kind, scenario, self._cycle_factory)
        run.node_type, run.speed, run.speed_max = kind.name, kind.speed, kind.speed
        run.start_clocks(scenario, self._costs, self._config)
        return run

    def _cycles(self, run: JobRun) -> Iterator[tuple[float, float]]:
        """Runs all cycles; yields the seconds of each, with the moves of its state and without."""
        for _ in range(run.cycles):
            run.begin_rollout()
            run.rolling = False
            run.rolled += 1
            run.begin_cycle()
            yield run.end_cycle()

    def _run_job(self, job: TraceJob, start_s: float) -> None:
        """Report a job that has ended."""
        run, collector = self._run(job), self._collector
        collector.group_made(job.job_id, run.gpus, start_s)
        if (rollouts := run.rollouts) is not None:
            collector.group_made(rollouts.deployment, rollouts.gpus, start_s, rolls_out=True)
        at, worked_s, rolled_s = start_s, 0.0, 0.0
        for took_s, least_s in self._cycles(run):
            at += took_s
            self.cycles += 1
            collector.cycle_ended(job.job_id, took_s, least_s, 0.0)
            # To the bins of a utilisation it makes no difference when in a cycle GPUs work.
            trained_at = at - (run.worked_s - worked_s)
            collector.ran(job.job_id, job.job_id, run.gpus, "run", trained_at, at)
            if rollouts is not None:
                rolled_at = at - (run.rolled_s - rolled_s)
                group, gpus = rollouts.deployment, rollouts.gpus
                collector.ran(group, job.job_id, gpus, "rollout", rolled_at, at, 1.0)
            worked_s, rolled_s = run.worked_s, run.rolled_s
        collector.group_gone(job.job_id, run.gpus, at)
        worked_gpu_s = run.gpus * worked_s
        if rollouts is not None:
            collector.group_gone(rollouts.deployment, rollouts.gpus, at)
            worked_gpu_s += rollouts.gpus * rolled_s
        assert run.least is not None
        collector.job_ended(job.job_id, at, COMPLETED, run.least.now, worked_gpu_s)
