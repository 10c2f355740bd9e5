"""What the policies make of three months of jobs on 2 048 training GPUs.

    python -m benchmarks.simulator.drain [--full] [--json] [workload …]

Workloads:

* `mix`: 90 days of the published 7B, 30B and 235B jobs (12 a day, published GPU counts, Philly's
  durations, 15 % jitter), all waiting at the start;
* `mix-async`: the same with one step of staleness, as in PlexRL §6.3;
* `philly`: the bundled Philly trace, its arrivals six times as fast, durations capped at 14 days,
  cycles of the published profiles; `philly-async` likewise;
* `philly-backlog`: the same jobs, all waiting at the start.

Without `--full` of Philly every eighth job is run, on an eighth of the cluster. A run of all its
74 167 jobs is some 15 million events a policy.

*gap*: part of what lies between `isolated` and the bound that is won, (isolated - drain) /
(isolated - bound). *cycles*: how much longer than the same drawn cycles alone. *wait*: from
submission to first GPUs, by the job's length alone (PlexRL Fig. 8). *fairness*: Jain's index over
tenants' mean slowdowns.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from benchmarks.report import report
from plexrl.sim.policies import SIM_POLICIES
from plexrl.sim.result import SimResult
from plexrl.sim.scenario import Behaviour, JobSource, Pool, Scenario
from plexrl.sim.sweep import FailedRun, run_all
from plexrl.sim.trace_source import PublishedSource, TraceSource
from plexrl.traces import Shape, TraceJob

DAY_S = 86_400.0
NODES = 256
"""Of 8 GPUs: 2 048."""
SAMPLE = 8
SEED = 1
PHILLY = Shape(compress=6.0, cap_s=14 * DAY_S)
BACKLOG = Shape(backlog=True, cap_s=14 * DAY_S)

COLUMNS = (
    *("policy", "drain, days", "of isolated", "gap", "cycles +median", "+mean", "+p95"),
    *("wait median", "wait mean", "fairness", "switches"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryNth:
    """A part of a trace: each `step`-th of its jobs."""

    source: JobSource
    step: int

    def jobs(self) -> Iterator[TraceJob]:
        """In their order."""
        return islice(self.source.jobs(), 0, None, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs and the cluster that they are run on."""

    source: JobSource
    nodes: int
    staleness: int = 0

    def scenario(self, policy: str) -> Scenario:
        """The workload under a policy."""
        return Scenario(
            source=self.source,
            pools=(Pool(nodes=self.nodes),),
            policy=policy,
            seed=SEED,
            behaviour=Behaviour(staleness=self.staleness),
        )


def workloads(*, full: bool) -> dict[str, Workload]:
    """By name."""
    step = 1 if full else SAMPLE
    mix = PublishedSource(span_s=90 * DAY_S, shape=BACKLOG, seed=SEED)

    def philly(shape: Shape, staleness: int = 0) -> Workload:
        whole = TraceSource(trace="bundled:philly", shape=shape, seed=SEED)
        return Workload(
            source=EveryNth(source=whole, step=step), nodes=NODES // step, staleness=staleness
        )

    return {
        "mix": Workload(source=mix, nodes=NODES),
        "mix-async": Workload(source=mix, nodes=NODES, staleness=1),
        "philly": philly(PHILLY),
        "philly-async": philly(PHILLY, staleness=1),
        "philly-backlog": philly(BACKLOG),
    }


def results(
    workload: Workload, policies: Sequence[str] = tuple(SIM_POLICIES)
) -> dict[str, SimResult]:
    """Of each policy.

    Raises:
        PlexRLError: a run came to no result.
    """
    found: dict[str, SimResult] = {}
    for name, outcome in zip(
        policies, run_all([workload.scenario(name) for name in policies]), strict=True
    ):
        if isinstance(outcome, FailedRun):
            raise outcome.error
        found[name] = outcome
    return found


def recovered(isolated: SimResult, other: SimResult) -> float:
    """Part of the gap between `isolated` and what no scheduler can beat."""
    bound_s = isolated.bounds.bound_s
    return (isolated.drain_s - other.drain_s) / (isolated.drain_s - bound_s)


def table(found: Mapping[str, SimResult]) -> list[tuple[str, ...]]:
    """A row for the bound and for each policy; `isolated` is one of them."""
    isolated = found["isolated"]
    bounds = isolated.bounds
    what = "path" if bounds.critical_path_s > bounds.area_s else "area"
    share = f"{bounds.bound_s / isolated.drain_s:.0%}"
    rows = [(f"bound ({what})", f"{bounds.bound_s / DAY_S:.1f}", share, "100%", *[""] * 7)]
    rows += [_row(name, result, isolated) for name, result in found.items()]
    return rows


def _row(name: str, result: SimResult, isolated: SimResult) -> tuple[str, ...]:
    slower, wait = result.cycle_slowdown, result.normalized_wait
    failed = f" ({result.failed_jobs} failed)" if result.failed_jobs else ""
    return (
        name + failed,
        f"{result.drain_s / DAY_S:.1f}",
        f"{result.drain_s / isolated.drain_s:.1%}",
        f"{recovered(isolated, result):.0%}",
        *(f"{part:.1%}" for part in (slower.median, slower.mean, slower.p95)),
        f"{wait.median:.1f}",
        f"{wait.mean:.1f}",
        f"{result.fairness:.3f}",
        f"{result.switches}",
    )


def figures_of(name: str, found: Mapping[str, SimResult]) -> dict[str, float]:
    """Those of `spread+backfill`, and every policy's drain."""
    isolated, best = found["isolated"], found["spread+backfill"]
    slower = best.cycle_slowdown
    # The synchronous mix is what the bars are about.
    mark = "" if name == "mix" else f"{name.replace('-', '_')}_"
    figures = {
        f"{mark}drain_ratio": best.drain_s / isolated.drain_s,
        f"{mark}gap_recovered": recovered(isolated, best),
        f"{mark}median_slowdown": slower.median,
        f"{mark}mean_slowdown": slower.mean,
        f"{mark}p95_slowdown": slower.p95,
    }
    for policy, result in found.items():
        key = policy.replace("+", "_").replace("-", "_")
        figures[f"{mark}drain_days_{key}"] = result.drain_s / DAY_S
    return figures


def measure(
    names: Sequence[str] = (), *, full: bool = False
) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Rows of `COLUMNS` and figures."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for name, workload in workloads(full=full).items():
        if names and name not in names:
            continue
        sys.stderr.write(f"drain: {name} …\n")
        found = results(workload)
        title = f"{name}: {found['isolated'].jobs} jobs, {found['isolated'].gpus} GPUs"
        rows += [(title, *[""] * (len(COLUMNS) - 1)), *table(found)]
        figures |= figures_of(name, found)
    return rows, figures


def main() -> None:
    """Run the workloads that the command line names, else all."""
    names = [each for each in sys.argv[1:] if not each.startswith("--")]
    rows, figures = measure(names, full="--full" in sys.argv)
    report("Drain of three months on 2 048 GPUs", COLUMNS, rows, figures)


if __name__ == "__main__":
    main()
