"""Compares policies on three months of jobs and 2 048 training GPUs.

* `mix`: 90 days of the published 7B, 30B and 235B jobs (12 a day, published GPU counts, Philly's
  durations up to 14 days, 15 % jitter), all waiting at the start;
* `mix, stale`: the same with one step of staleness, as in PlexRL §6.3;
* `philly`: the bundled Philly trace, its arrivals six times as fast, durations capped at 14 days,
  cycles of the published profiles by size; `philly, stale` likewise;
* `philly, backlog`: the same jobs, all waiting at the start.

The cluster has training GPUs only: *days*, *of isolated* and *gap* count those alone. `isolated`
does not backfill past a job that has waited ten minutes. *all GPU-h* covers the whole cluster: all
training GPUs until the drain and rollout GPUs while their jobs ran, in thousands, compared with
`isolated` and `isolated+backfill`. The last row runs `isolated+backfill` on an equal fleet: as many
GPUs as `spread+backfill` had for training and, at its peak, for rollouts, because rollout GPUs are
unlimited and the drain time alone favours a policy that runs more jobs at once.

In full, a policy has 1 to 2 million events for the mix and 7 to 20 million for Philly. Without
`--full`, jobs of the mix have an eighth of their cycles. For Philly, every eighth job runs with an
eighth of its cycles on an eighth of the cluster, with arrivals another eight times as fast.

    python -m benchmarks.simulating.drain mix [--quick] [--part 8] [--out results] [policy …]

runs one whole workload, one policy after the other; `--part N` runs every N-th job of Philly with
all of its cycles on a cluster that is N times smaller. Each result is stored in the folder and
reused; the table shows all stored results.

*gap*: (isolated - drain) / (isolated - bound), a dash if `isolated` is at or near the bound.
*slower*: slowdown of cycles relative to the same drawn cycles alone, median/mean/95 %. *wait*: from
submission to the first GPUs, relative to the duration alone (PlexRL Fig. 8). *worst
tenant*: the greatest of the tenants' mean slowdowns, waiting included.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from benchmarks.report import Part, report
from benchmarks.sizes import sized
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.results.comparison import recovered
from plexrl.sim.results.headline import whole_gpu_hours
from plexrl.sim.results.result import SimResult, Speed
from plexrl.sim.results.result_json import dumps, result_from, result_values, speed_values
from plexrl.sim.search.one_run import FailedRun
from plexrl.sim.search.sweep import run_all
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import Behaviour, JobSource, Pool, Scenario
from plexrl.sim.workload.source.trace_source import PublishedSource, TraceSource
from plexrl.traces import Shape, TraceJob

DAY_S = 86_400.0
NODES = sized(256, quick=64)
"""Nodes of 8 GPUs: 2 048 GPUs."""
SAMPLE = sized(8, quick=1)
SEED = 1
POLICIES = sized(tuple(SIM_POLICIES), quick=("isolated", "isolated+backfill", "spread+backfill"))
SPAN_S = sized(90 * DAY_S, quick=DAY_S)
CAP_S = sized(14 * DAY_S, quick=DAY_S / 24)
PHILLY = Shape(compress=6.0, cap_s=CAP_S)
BACKLOG = Shape(backlog=True, cap_s=CAP_S)
PHILLY_STEP = sized(1, quick=500)
"""Only every N-th job of Philly is run."""

ISOLATED, BACKFILLED, SHARED = "isolated", "isolated+backfill", "spread+backfill"
FLEET = "equal fleet"
NEEDED = (ISOLATED, BACKFILLED, SHARED)
"""Policies that the comparison needs."""

COLUMNS = (
    *("policy", "days", "of isolated", "gap", "all GPU-h", "of isolated", "of +backfill"),
    *("slower %", "wait median", "worst tenant"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sample of a trace: every `step`-th job, with a fraction of its cycles."""

    source: JobSource
    step: int = 1
    shorter: int = 1

    def jobs(self) -> Iterator[TraceJob]:
        """In their order."""
        for job in islice(self.source.jobs(), 0, None, self.step):
            assert job.cycles is not None, f"{job.job_id} has no cycles"
            assert job.period_s is not None, f"{job.job_id} has no period"
            cycles = max(1, job.cycles // self.shorter)
            yield replace(
                job,
                submit_s=job.submit_s / self.shorter,
                cycles=cycles,
                duration_s=cycles * job.period_s,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs and their cluster."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFleet:
    """The same jobs, with rollout GPUs taken from the cluster too."""

    source: JobSource

    def jobs(self) -> Iterator[TraceJob]:
        """In their order."""
        for job in self.source.jobs():
            yield replace(job, gpus=job.gpus + job.rollout_gpus, rollout_gpus=0)


def equal_fleet(scenario: Scenario, shared: SimResult, policy: str) -> Scenario:
    """`policy`, one without sharing, on as many GPUs as the run `shared` of `scenario` had in all:
    its training GPUs, and its rollout GPUs when it had most of them."""
    pool = scenario.pools[0]
    gpus = shared.gpus + shared.rollout_gpus_peak
    nodes = -(-gpus // pool.node_type.gpus)
    return replace(
        scenario,
        source=OneFleet(source=scenario.source),
        pools=(Pool(nodes=nodes, node_type=pool.node_type),),
        policy=policy,
    )


def workloads(*, part: int = 1, shorter: int = 1) -> dict[str, Workload]:
    """By name: of Philly, each `part`-th job on as much smaller a cluster; jobs with one of
    `shorter` cycles, coming as much faster."""
    backlog = PublishedSource(span_s=SPAN_S, shape=BACKLOG, seed=SEED)
    mix = Sample(source=backlog, shorter=shorter)

    def philly(shape: Shape, staleness: int = 0) -> Workload:
        whole = TraceSource(trace="bundled:philly", shape=shape, seed=SEED)
        sample = Sample(source=whole, step=part * PHILLY_STEP, shorter=shorter)
        return Workload(source=sample, nodes=NODES // part, staleness=staleness)

    return {
        "mix": Workload(source=mix, nodes=NODES),
        "mix, stale": Workload(source=mix, nodes=NODES, staleness=1),
        "philly": philly(PHILLY),
        "philly, stale": philly(PHILLY, staleness=1),
        "philly, backlog": philly(BACKLOG),
    }


def results(workload: Workload, policies: Sequence[str] = POLICIES) -> dict[str, SimResult]:
    """Of each policy, and of the equal fleet.

    Raises:
        PlexRLError: a run came to no result.
    """
    scenarios = [workload.scenario(name) for name in policies]
    found = dict(zip(policies, _run(scenarios), strict=True))
    fleet = equal_fleet(workload.scenario(SHARED), found[SHARED], BACKFILLED)
    return {**found, FLEET: _run([fleet])[0]}


def _run(scenarios: Sequence[Scenario]) -> list[SimResult]:
    found = []
    for outcome in run_all(scenarios):
        if isinstance(outcome, FailedRun):
            raise outcome.error
        found.append(outcome)
    return found


def table(found: Mapping[str, SimResult]) -> list[tuple[str, ...]]:
    """One row for the bound and one for each run, with those of `NEEDED`."""
    isolated = found[ISOLATED]
    bounds = isolated.bounds
    what = "path" if bounds.critical_path_s > bounds.area_s else "area"
    share = f"{bounds.bound_s / isolated.drain_s:.0%}"
    rows = [(f"bound ({what})", f"{bounds.bound_s / DAY_S:.1f}", share, "100%", *[""] * 6)]
    rows += [_row(name, result, found) for name, result in found.items()]
    return rows


def _row(name: str, result: SimResult, found: Mapping[str, SimResult]) -> tuple[str, ...]:
    isolated, whole = found[ISOLATED], whole_gpu_hours(result)
    slower, wait = result.cycle_slowdown, result.normalized_wait
    failed = f" ({result.failed_jobs} failed)" if result.failed_jobs else ""
    gap = None if name == FLEET else recovered(result, isolated)
    return (
        name + failed,
        f"{result.drain_s / DAY_S:.1f}",
        f"{result.drain_s / isolated.drain_s:.1%}",
        "-" if gap is None else f"{gap:.0%}",
        f"{whole / 1000:,.0f}",
        *(f"{whole / whole_gpu_hours(found[each]):.1%}" for each in (ISOLATED, BACKFILLED)),
        "/".join(
            # Adding 0 avoids a negative zero.
            f"{round(100 * each, 1) + 0.0:.1f}"
            for each in (slower.median, slower.mean, slower.p95)
        ),
        f"{wait.median:.1f}",
        f"{result.worst_tenant:.2f}",
    )


def figures_of(name: str, found: Mapping[str, SimResult]) -> dict[str, float]:
    """Those of `spread+backfill`, and every policy's drain. The mix's have plain names."""
    isolated, shared = found[ISOLATED], found[SHARED]
    slower, whole = shared.cycle_slowdown, whole_gpu_hours(shared)
    mark = "" if name == "mix" else f"{name.replace(', ', '_')}_"
    figures = {
        f"{mark}drain_ratio": shared.drain_s / isolated.drain_s,
        f"{mark}whole_ratio": whole / whole_gpu_hours(isolated),
        f"{mark}whole_ratio_backfill": whole / whole_gpu_hours(found[BACKFILLED]),
        f"{mark}equal_fleet_ratio": shared.drain_s / found[FLEET].drain_s,
        f"{mark}median_slowdown": slower.median,
        f"{mark}mean_slowdown": slower.mean,
        f"{mark}p95_slowdown": slower.p95,
    }
    gap = recovered(shared, isolated)
    if gap is not None:
        figures[f"{mark}gap_recovered"] = gap
    for policy in SIM_POLICIES:
        if policy in found:
            key = policy.replace("+", "_").replace("-", "_")
            figures[f"{mark}drain_days_{key}"] = found[policy].drain_s / DAY_S
    return figures


def measure(*, full: bool) -> Part:
    """Every workload under every policy."""
    part = Part(title="Drain of three months' jobs, 2 048 GPUs", columns=COLUMNS)
    part_of = 1 if full else SAMPLE
    for name, workload in workloads(part=part_of, shorter=part_of).items():
        sys.stderr.write(f"drain: {name} …\n")
        found = results(workload)
        isolated = found["isolated"]
        title = f"{name}: {isolated.jobs} jobs, {isolated.gpus} GPUs"
        part.rows.append((title, *[""] * (len(COLUMNS) - 1)))
        part.rows.extend(table(found))
        part.figures.update(figures_of(name, found))
    return part


def kept(folder: Path, name: str, run: str, scenario: Scenario) -> SimResult:
    """The result in the folder, computed if it does not exist.

    Raises:
        PlexRLError: the run came to no result.
    """
    nodes = scenario.pools[0].nodes
    file = folder / f"{name}-{run}-{nodes}.json".replace(", ", "_").replace(" ", "_")
    if not file.exists():
        result = simulate(scenario)
        values = {"result": result_values(result), "speed": speed_values(result.speed)}
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(dumps(values))
    values = json.loads(file.read_text())
    found = result_from(values["result"], Speed(**values["speed"]))
    sys.stderr.write(
        f"{run}: {found.events} events in {found.speed.wall_s:.0f} s, "
        f"{found.speed.peak_bytes >> 20} MiB\n"
    )
    return found


def main() -> None:
    """One workload, by name."""
    named = workloads()
    parser = argparse.ArgumentParser(description="One workload, one policy after the other.")
    parser.add_argument("workload", choices=named)
    parser.add_argument("policy", nargs="*", default=POLICIES, metavar="policy")
    parser.add_argument("--part", type=int, default=1, help="every so manyth job of Philly")
    parser.add_argument("--shorter", type=int, default=1, help="jobs of one of so many cycles")
    parser.add_argument("--out", type=Path, default=Path("out/drain"), help="folder")
    parser.add_argument("--quick", action="store_true", help="few short jobs, nothing kept")
    options = parser.parse_intermixed_args()
    workload = workloads(part=options.part, shorter=options.shorter)[options.workload]
    name = options.workload + (f"-{options.shorter}" if options.shorter > 1 else "")
    with ExitStack() as stack:
        folder = options.out
        if options.quick:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plexrl-bench-")))
        found = compared(folder, name, workload, options.policy)
    isolated, shared = found[ISOLATED], found[SHARED]
    title = (
        f"{options.workload}: {isolated.jobs} jobs, {isolated.gpus} training GPUs; {SHARED} had "
        f"{shared.rollout_gpus_peak} rollout GPUs at its peak, "
        f"an equal fleet {found[FLEET].gpus} GPUs"
    )
    report(title, COLUMNS, table(found), {})


def compared(
    folder: Path, name: str, workload: Workload, policies: Sequence[str]
) -> dict[str, SimResult]:
    """The results of `NEEDED`, of the policies and of the equal fleet; paces go to stderr."""
    found: dict[str, SimResult] = {}
    for policy in dict.fromkeys((*NEEDED, *policies)):
        found[policy] = kept(folder, name, policy, workload.scenario(policy))
    fleet = equal_fleet(workload.scenario(SHARED), found[SHARED], BACKFILLED)
    found[FLEET] = kept(folder, name, FLEET, fleet)
    return found


if __name__ == "__main__":
    main()
