"""Measures StaleFlow's rollout coordination on simulated instances, beside other systems.

    python -m benchmarks.rollout_staleflow [--quick] [--json] [--workers=N]

The setting of StaleFlow §6: Qwen3-30B-A3B on 128 GPUs, 128 prompts of 16 responses each, at most
20 000 and 40 000 tokens, a staleness bound of 1, 2 and 3. Each system has the split of GPUs between
rollout and training with which it is fastest. All figures but `decision_ms` follow from the model
of docs/simulating_rollouts.md, and are the same on every machine. `gain_vs_inflight_loose` is over
AReaL's order of training, which does not keep the bound; StaleFlow's does.
"""

import sys
from dataclasses import replace
from itertools import product

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.sim.rollout.results.gains import PUBLISHED, gains
from plexrl.sim.rollout.results.outcome import Outcome, outcome
from plexrl.sim.rollout.run import simulate_rollout
from plexrl.sim.rollout.setting import BOUNDED, Setting, Strategies, System, SystemName
from plexrl.sim.rollout.split import Runner, best_splits, runner
from plexrl.sim.rollout.workload import Workload

LIMITS = (20_000, 40_000)
BOUNDS = sized((1, 2, 3), quick=(1, 2))
CLUSTER = sized({"gpus": 128, "batch_groups": 128}, quick={"gpus": 16, "batch_groups": 12})
STEPS = sized(16, quick=10)
"""12 steps are measured: whole numbers of the periods of η + 1 steps in which systems train."""
DECISION = sized(
    {"gpus": 192, "rollout": 128, "batch_groups": 128, "steps": 5},
    quick={"gpus": 24, "rollout": 16, "batch_groups": 12, "steps": 2},
)
"""Where the decision is measured: 128 instances, 8192 trajectories."""


def setting(limit: int) -> Setting:
    """The paper's setting."""
    return Setting(
        gpus=CLUSTER["gpus"],
        batch_groups=CLUSTER["batch_groups"],
        workload=Workload(limit=limit),
        steps=STEPS,
        warmup_steps=4,
        cycle_s=5.0,
    )


def systems() -> list[System]:
    """All systems with each bound."""
    fixed = [System(name=SystemName.SYNC), System(name=SystemName.ONE_STEP, staleness=1)]
    return fixed + [System(name=name, staleness=bound) for name, bound in product(BOUNDED, BOUNDS)]


def ablation(run: Runner, full: Outcome) -> list[Outcome]:
    """StaleFlow with each subset of its strategies, on the split of the full system."""
    flags = sorted(product((False, True), repeat=3), key=sum)
    subsets = [
        Strategies(routing=routing, synchronization=synchronization, migration=migration)
        for routing, synchronization, migration in flags
    ]
    asked = [(setting(full.limit), replace(full.system, strategies=each)) for each in subsets[:-1]]
    return [*best_splits(run.outcome, asked, on_run=progress), full]


def decision_ms() -> tuple[float, float]:
    """Median and 99th percentile of a decision, in milliseconds of CPU time."""
    where = Setting(
        gpus=DECISION["gpus"],
        batch_groups=DECISION["batch_groups"],
        steps=DECISION["steps"],
        warmup_steps=0,
        workload=Workload(limit=40_000),
        cycle_s=5.0,
    )
    system = System(name=SystemName.STALEFLOW, staleness=3, rollout_gpus=DECISION["rollout"])
    found = outcome(where, system, simulate_rollout(where, system)).decision_ms
    assert found is not None, "the coordinator decided"
    return found


def progress(each: Outcome) -> None:
    """Show a run that ended."""
    sys.stderr.write(
        f"{each.limit} {each.system.label} {each.system.rollout_gpus}: {each.throughput:,.0f}\n"
    )


def row(each: Outcome) -> tuple[str, ...]:
    """A run in the table."""
    return (
        f"{each.limit:,}",
        each.system.label,
        f"{each.system.rollout_gpus or CLUSTER['gpus']}",
        f"{each.throughput:,.0f}",
        f"{each.step_s:,.0f}",
        f"{each.staleness_mean:.2f}, at most {each.staleness_max}",
        f"{each.decode:.0%} / {each.prefill:.0%} / {each.pull:.0%}",
        f"{each.train:.0%}",
        f"{each.prefills:.2f}",
    )


def main() -> None:
    """Run all systems, then the ablation, then the decision."""
    given = [word for word in sys.argv[1:] if word.startswith("--workers=")]
    with runner(int(given[0].partition("=")[2]) if given else None) as run:
        asked = [(setting(limit), system) for limit in LIMITS for system in systems()]
        found = best_splits(run.outcome, asked, on_run=progress)
        full = found[-1]
        subsets = ablation(run, full)
    median, high = decision_ms()
    figures: dict[str, float] = {}
    for each in gains(found):
        name = f"gain_vs_{each.over.value.replace('-', '_')}"
        figures |= {name: each.mean, f"{name}_largest": each.largest}
    vanilla = subsets[0].throughput
    rows = [row(each) for each in (*found, *subsets[:-1])]
    rows += [
        (
            "gain over",
            each.over.value,
            "",
            f"{each.mean:.2f}",
            f"≤{each.largest:.2f}",
            "published: {:.2f}, ≤{:.2f}".format(*PUBLISHED[each.over])
            if each.over in PUBLISHED
            else "does not keep the bound",
            *("", "", ""),
        )
        for each in gains(found)
    ]
    figures |= {
        f"ablation_{each.system.strategies.label}": each.throughput / vanilla for each in subsets
    }
    rows += [
        (
            "by vanilla",
            each.system.strategies.label,
            "",
            f"{each.throughput / vanilla:.3f}",
            *[""] * 5,
        )
        for each in subsets
    ]
    figures |= {"decision_ms": high, "decision_ms_median": median}
    rows.append(("decision", "p99, median", "", f"{high:.0f} ms", f"{median:.0f} ms", *[""] * 4))
    report(
        "Rollout coordination under a staleness bound, simulated",
        (
            *("limit", "system", "rollout GPUs", "tokens/s", "step s", "staleness"),
            *("decode / prefill / pull", "training", "KV computed"),
        ),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
