"""What protection from starvation costs, with and without sharing.

    python -m benchmarks.simulating.starvation [--quick] [--json]

The jobs are `bundled:mixed-sizes`: 200 jobs of 8 to 64 GPUs and half as many for rollouts, which
arrive in one day on 16 nodes of 8 GPUs; rollouts have GPUs of their own. *bound*: the wait after
which a job starves. The first starving job has a reservation; in the row `isolated` it has none,
and free GPUs wait for it. *of unprotected*: drain relative to `isolated+backfill` in which no job
starves.
"""

from benchmarks.report import Part, report
from benchmarks.simulating.cluster import results
from benchmarks.sizes import sized
from plexrl.sim.workload.scenario import STARVATION_S_MAX, Pool, Scenario
from plexrl.sim.workload.source.trace_source import TraceSource

ALONE, SHARED = "isolated+backfill", "spread+backfill"
DEFAULT_S = 600.0
UNPROTECTED = (ALONE, STARVATION_S_MAX)
PROTECTED = (SHARED, DEFAULT_S)
CASES = sized(
    (
        ("isolated", DEFAULT_S),
        (ALONE, DEFAULT_S),
        UNPROTECTED,
        *((SHARED, bound_s) for bound_s in (0.0, DEFAULT_S, 86_400.0, STARVATION_S_MAX)),
    ),
    quick=(UNPROTECTED, PROTECTED),
)
SPAN_S = sized(None, quick=3600.0)
COLUMNS = ("policy", "bound", "drain", "of unprotected", "longest wait", "p95", "mean")
HOUR_S = 3600.0


def scenario(policy: str, bound_s: float) -> Scenario:
    """One run."""
    source = TraceSource(trace="bundled:mixed-sizes", span_s=SPAN_S)
    return Scenario(
        source=source,
        pools=(Pool(nodes=16),),
        policy=policy,
        seed=1,
        rollouts="own",
        starvation_bound_s=bound_s,
    )


def measure(*, full: bool) -> Part:
    """All cases."""
    del full
    part = Part(title="Protection from starvation", columns=COLUMNS)
    runs = dict(zip(CASES, results([scenario(*case) for case in CASES]), strict=True))
    alone = runs[UNPROTECTED]
    for (policy, bound_s), run in runs.items():
        part.rows.append(
            (
                policy,
                "none" if bound_s == STARVATION_S_MAX else f"{bound_s:g} s",
                f"{run.drain_s / HOUR_S:.1f} h",
                f"{run.drain_s / alone.drain_s:.1%}",
                f"{run.wait.highest / HOUR_S:.1f} h",
                f"{run.wait.p95 / HOUR_S:.1f} h",
                f"{run.wait.mean / HOUR_S:.1f} h",
            )
        )
    shared = runs[PROTECTED]
    part.figures["drain_ratio_starvation"] = shared.drain_s / alone.drain_s
    part.figures["longest_wait_starvation_h"] = shared.wait.highest / HOUR_S
    return part


if __name__ == "__main__":
    found = measure(full=False)
    report(found.title, found.columns, found.rows, found.figures)
