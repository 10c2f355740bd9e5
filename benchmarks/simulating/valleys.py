"""How much of the idle time of groups preemptible deployments take, and what that costs the others.

    python -m benchmarks.simulating.valleys [--quick] [--json]

The jobs are ten days of the published 7B, 30B and 235B jobs (12 a day, of which a thirty-second is
run), synchronous, with 15 % jitter, all waiting at the start for 1 024 training GPUs; a switch
takes 8 s. Each policy runs the same jobs twice: alone, and with a preemptible deployment in each
group that always has something to generate (`plexrl simulate --fill-valleys`).

*idle*: GPU-hours of groups in which, in the run without them, nothing ran or moved. *filled*: GPU-
hours of useful generation, relative to these. Switches do not count as useful, nor the first 2 s of
a continued generation, which compute its KV cache again. *added*: to the slowdown of the others'
cycles, by the mean and the 95th percentile. Means over the seeds.
"""

from dataclasses import replace
from statistics import fmean

from benchmarks.report import Part, report
from benchmarks.simulating.cluster import SWITCH_S, by_policy
from benchmarks.simulating.drain import CAP_S, Sample
from benchmarks.sizes import sized
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import Behaviour, Pool, Scenario
from plexrl.sim.workload.source.trace_source import PublishedSource
from plexrl.traces import Shape

SEEDS = sized((1, 2, 3, 4, 5, 6), quick=(1,))
NODES = sized(128, quick=48)
SHORTER = sized(32, quick=512)
DAYS = sized(10, quick=1)
DAY_S = 86_400.0
SHARED = "spread+backfill"
POLICIES = sized(("isolated+backfill", "pack", SHARED), quick=(SHARED,))
COLUMNS = ("policy", "idle GPU-h", "filled", "slowdown mean", "added", "p95", "added p95", "drain")


def jobs(policy: str, seed: int) -> Scenario:
    """The jobs alone."""
    shape = Shape(backlog=True, cap_s=CAP_S)
    source = PublishedSource(span_s=DAYS * DAY_S, jobs_per_day=12.0, shape=shape, seed=seed)
    return Scenario(
        source=Sample(source=source, shorter=SHORTER),
        pools=(Pool(nodes=NODES),),
        policy=policy,
        seed=seed,
        behaviour=Behaviour(staleness=0),
        switch_s=SWITCH_S,
    )


def idle_hours(run: SimResult) -> float:
    """GPU-hours of groups in which nothing ran or moved."""
    return run.training_gpu_hours - run.busy_gpu_hours - run.switch_gpu_hours


def measure(*, full: bool) -> Part:
    """Each policy, with and without preemptible deployments."""
    del full
    part = Part(title="Idle time of groups that preemptible generation takes", columns=COLUMNS)
    alone = {policy: [jobs(policy, seed) for seed in SEEDS] for policy in POLICIES}
    beside = {p: [replace(e, fills_valleys=True) for e in s] for p, s in alone.items()}
    before, after = by_policy(alone), by_policy(beside)
    for policy in POLICIES:
        pairs = list(zip(before[policy], after[policy], strict=True))
        filled = fmean(b.filled_gpu_hours / idle_hours(a) for a, b in pairs)
        mean = fmean(b.cycle_slowdown.mean - a.cycle_slowdown.mean for a, b in pairs)
        p95 = fmean(b.cycle_slowdown.p95 - a.cycle_slowdown.p95 for a, b in pairs)
        part.rows.append(
            (
                policy,
                f"{fmean(idle_hours(a) for a, _ in pairs):,.0f}",
                f"{filled:.1%}",
                f"{fmean(a.cycle_slowdown.mean for a, _ in pairs):.1%}",
                f"{100 * mean:+.2f}",
                f"{fmean(a.cycle_slowdown.p95 for a, _ in pairs):.1%}",
                f"{100 * p95:+.2f}",
                f"{fmean(b.drain_s / a.drain_s for a, b in pairs):.3f}",
            )
        )
        mark = "" if policy == SHARED else f"_{policy.split('+')[0]}"
        part.figures[f"valleys_filled{mark}"] = filled
        part.figures[f"slowdown_added{mark}"] = mean
        part.figures[f"slowdown_added_p95{mark}"] = p95
    return part


def main() -> None:
    """Print the table."""
    part = measure(full=False)
    report(part.title, part.columns, part.rows, part.figures)


if __name__ == "__main__":
    main()
