"""Four jobs with tail batching on shared training GPUs, in the scheduler's own core.

    python -m benchmarks.simulating.rollout_shared [--quick] [--json]

Each job is the 14B setting of `benchmarks.rollout_flexes` with a seed of its own: 40 steps, whose
rollouts and training take what `plexrl simulate-rollout` has simulated for the job alone on 32
GPUs: synchronously (`sync`), with tail batching (`T`), and with rewards beside it (`TR`). Here a
job has 32 GPUs of its own for rollouts, and trains on 32 that others use while it generates. The
scheduler of `plexrl simulate` places and orders the training steps, on one, two or four groups of
32 GPUs. *isolated* is a group for each job. *of sync* is the time in which the same cluster ends
the synchronous jobs by that of these (`shared_2_T`: two groups). *GPU-h a step* counts rollout GPUs
while their jobs run, and training GPUs while groups hold them. The stream trainer is left out: it
trains on rollout GPUs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from benchmarks.report import report
from benchmarks.rollout_flexes import PUBLISHED, SYNC, flexes, setting
from benchmarks.sizes import sized
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.results.result import SimResult
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import System
from plexrl.sim.workload.cycles import TOKENS, CycleSource, DrawnCycle
from plexrl.sim.workload.scenario import GIB, NodeType, Pool, Scenario
from plexrl.traces import TraceJob, TraceSegment

(CASE,) = (each for each in PUBLISHED if each.name == "14b")
JOBS = 4
GROUPS = sized((1, 2, 4), quick=(1, 4))
SYSTEMS: Mapping[str, System] = {"sync": SYNC, "T": flexes("T"), "TR": flexes("TR")}
NODE = NodeType(name="h800", gpu_memory_bytes=80 * GIB)
STATE_BYTES = round(16 * CASE.model.parameters)
"""Parameters and gradients in bf16, parameters and moments of Adam in fp32."""
STAGGER_S = 60.0
COLUMNS = (
    *("jobs", "training GPUs", "policy", "hours", "of sync", "training busy", "step slower"),
    "GPU-h a step",
)


@dataclass(slots=True)
class Steps:
    """The steps of a job alone."""

    cycles: tuple[DrawnCycle, ...]
    functions: tuple[str, ...] = ("update",)

    def draw(self, number: int) -> DrawnCycle:
        """See `CycleSource`."""
        return self.cycles[number % len(self.cycles)]


@dataclass(frozen=True, slots=True)
class Jobs:
    """Jobs that are in memory, and the factory of their cycles."""

    steps: tuple[Steps, ...]

    def jobs(self) -> Iterator[TraceJob]:
        """All jobs, one after the other, with their mean steps."""
        for at, each in enumerate(self.steps):
            rollout_s = fmean(cycle.rollout_s for cycle in each.cycles)
            train_s = fmean(cycle.busy_s for cycle in each.cycles)
            yield TraceJob(
                job_id=f"job{at}",
                submit_s=at * STAGGER_S,
                gpus=CASE.gpus,
                rollout_gpus=CASE.gpus,
                cycles=len(each.cycles),
                period_s=rollout_s + train_s,
                segments=(TraceSegment(function="update", offset_s=rollout_s, duration_s=train_s),),
                state_bytes=STATE_BYTES,
            )

    def factory(self, job: TraceJob, *_: object, **__: object) -> CycleSource:
        """See `CycleFactory`."""
        return self.steps[int(job.job_id.removeprefix("job"))]


def steps(system: System, seed: int) -> Steps:
    """The steps of a job alone on its GPUs. New parameters are loaded at the start of a step, as in
    `simulate_rollout`."""
    recorder = simulate_rollout(setting(CASE, seed), system)
    ends_s = [0.0, *(each.end_s for each in recorder.steps)]
    return Steps(
        tuple(
            DrawnCycle(each.start_s - before_s, (each.end_s - each.start_s,), (), TOKENS)
            for before_s, each in zip(ends_s, recorder.steps, strict=False)
        )
    )


def drained(jobs: Jobs, groups: int, policy: str) -> SimResult:
    """The run of all jobs on so many groups of training GPUs."""
    nodes = groups * CASE.gpus // NODE.gpus
    scenario = Scenario(source=jobs, pools=(Pool(nodes=nodes, node_type=NODE),), policy=policy)
    return simulate(scenario, cycle_factory=jobs.factory)


def main() -> None:
    """Run every system on every cluster."""
    jobs = {
        name: Jobs(tuple(steps(system, seed) for seed in range(JOBS)))
        for name, system in SYSTEMS.items()
    }
    clusters = [(JOBS, "isolated"), *((each, "spread+backfill") for each in GROUPS)]
    figures: dict[str, float] = {}
    rows = []
    for groups, policy in clusters:
        base = None
        for name, each in jobs.items():
            found = drained(each, groups, policy)
            base = base or found
            ratio = base.drain_s / found.drain_s
            where = "isolated" if policy == "isolated" else f"shared_{groups}"
            if name != "sync":
                figures[f"{where}_{name}"] = ratio
            figures[f"{where}_{name}_gpu_hours"] = (
                found.training_gpu_hours + found.rollout_gpu_hours
            ) / found.cycles
            rows.append(
                (
                    name,
                    f"{found.gpus}",
                    policy,
                    f"{found.drain_s / 3600:.2f}",
                    f"{ratio:.2f}",
                    f"{found.busy_gpu_hours * 3600 / (found.gpus * found.drain_s):.0%}",
                    f"{found.cycle_slowdown.mean:.1%}",
                    f"{figures[f'{where}_{name}_gpu_hours']:.2f}",
                )
            )
    report("Four jobs on shared training GPUs, simulated", COLUMNS, rows, figures)


if __name__ == "__main__":
    main()
