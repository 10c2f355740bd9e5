"""Measures StaleFlow's rollout coordination on simulated instances, beside other systems.

    python -m benchmarks.rollout_staleflow [--quick] [--json] [--workers=N]

The setting of StaleFlow §6: Qwen3-30B-A3B on 128 GPUs, 128 prompts of 16 responses each, at most
20 000 and 40 000 tokens, a staleness bound of 1, 2 and 3. Each system has the split of GPUs between
rollout and training with which it is fastest on the first seed; gains are means over all seeds, and
their spread is the standard deviation of the seeds. All figures but `decision_ms` follow from the
model of docs/simulating_rollouts.md, and are the same on every machine. `inflight_loose` does not
keep the bound, and `inflight_rebalanced` does what no system of its class does.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean, stdev

from benchmarks.report import report
from benchmarks.rollout_systems.rivals import BOUNDED, Rival, split
from benchmarks.sizes import sized
from plexrl.latency.costs import EngineCosts
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.runs.split import Runner, best_splits, runner
from plexrl.sim.rollout.setting import Setting, Strategies, System, SystemName
from plexrl.sim.rollout.workload import RolloutWorkload

Row = tuple[str, ...]
BySeed = Mapping[int, Sequence[RolloutOutcome]]
"""Outcomes of equal questions, in the same order for each seed."""
Run = Callable[[Setting, System], Future[RolloutOutcome]]

PUBLISHED = {"sync": (2.01, 2.68), "one-step": (1.52, 1.95), "inflight": (1.17, 1.42)}
"""Mean and largest gain of StaleFlow over each system (StaleFlow §6.2)."""

SEEDS = sized((0, 1, 2), quick=(0, 1))
LIMITS = (20_000, 40_000)
BOUNDS = sized((1, 2, 3), quick=(1, 2))
CLUSTER = sized({"gpus": 128, "batch_groups": 128}, quick={"gpus": 16, "batch_groups": 12})
STEPS = sized(16, quick=10)
"""12 steps are measured: whole numbers of the periods of η + 1 steps in which systems train."""
ABLATION = sized(
    {"gpus": 32, "rollout": 20, "batch_groups": 32},
    quick={"gpus": 8, "rollout": 5, "batch_groups": 4},
)
"""Where the strategies are switched off: a quarter of the paper's setting."""
ROLLOUT_BOUND = EngineCosts(train_gpu_s_per_token=1.8e-4)
"""Training takes a quarter of the time, so that it limits no system."""
DECISION = sized(
    {"gpus": 192, "rollout": 128, "batch_groups": 128, "steps": 5},
    quick={"gpus": 24, "rollout": 16, "batch_groups": 12, "steps": 2},
)
"""Where the decision is measured: 128 instances, 8192 trajectories."""
COLUMNS = (
    *("limit", "system", "rollout GPUs", "tokens/s", "step s", "staleness"),
    *("decode / prefill", "training", "KV computed"),
)


def setting(limit: int, seed: int = SEEDS[0]) -> Setting:
    """The paper's setting."""
    return Setting(
        gpus=CLUSTER["gpus"],
        batch_groups=CLUSTER["batch_groups"],
        workload=RolloutWorkload(limit=limit, seed=seed),
        steps=STEPS,
        warmup_steps=4,
        cycle_s=5.0,
    )


def compare_systems(run: Runner) -> dict[str, BySeed]:
    """The outcomes of each system by its name, with the best splits of the first seed on every
    seed; limits and bounds in one order."""
    bounded = [split(bound) for bound in BOUNDS]
    found = {
        "sync": on_seeds("sync", run.outcome, [System(name=SystemName.SYNC)]),
        Rival.ONE_STEP.value: on_seeds(
            Rival.ONE_STEP.value, partial(run.start, Rival.ONE_STEP.outcome), [split(1)]
        ),
    }
    for rival in BOUNDED:
        found[rival.value] = on_seeds(rival.value, partial(run.start, rival.outcome), bounded)
    return found | {"staleflow": on_seeds("staleflow", run.outcome, bounded)}


def on_seeds(name: str, run: Run, systems: Sequence[System]) -> BySeed:
    """The systems at all limits, with their best splits of the first seed, on every seed."""
    asked = [(setting(limit), system) for limit in LIMITS for system in systems]
    first = best_splits(run, asked, on_run=partial(progress, name))
    again = [
        (setting(outcome.limit, seed), outcome.system) for seed in SEEDS[1:] for outcome in first
    ]
    others = best_splits(run, again, on_run=partial(progress, name))
    size = len(asked)
    return {SEEDS[0]: first} | {
        seed: others[at * size : (at + 1) * size] for at, seed in enumerate(SEEDS[1:])
    }


def ablation(run: Runner) -> BySeed:
    """StaleFlow with each subset of its strategies, bound by rollout."""
    flags = sorted(product((False, True), repeat=3), key=sum)
    subsets = [
        Strategies(routing=routing, synchronization=synchronization, migration=migration)
        for routing, synchronization, migration in flags
    ]
    asked = [
        (
            replace(
                setting(LIMITS[-1], seed),
                gpus=ABLATION["gpus"],
                batch_groups=ABLATION["batch_groups"],
                costs=ROLLOUT_BOUND,
            ),
            System(
                name=SystemName.STALEFLOW,
                staleness=BOUNDS[-1],
                rollout_gpus=ABLATION["rollout"],
                strategies=strategies,
            ),
        )
        for seed in SEEDS
        for strategies in subsets
    ]
    found = best_splits(run.outcome, asked, on_run=partial(progress, "staleflow"))
    size = len(subsets)
    return {seed: found[at * size : (at + 1) * size] for at, seed in enumerate(SEEDS)}


def decision_ms() -> tuple[float, float]:
    """Median and 99th percentile of a decision, in milliseconds of CPU time."""
    where = Setting(
        gpus=DECISION["gpus"],
        batch_groups=DECISION["batch_groups"],
        steps=DECISION["steps"],
        warmup_steps=0,
        workload=RolloutWorkload(limit=40_000),
        cycle_s=5.0,
    )
    system = System(name=SystemName.STALEFLOW, staleness=3, rollout_gpus=DECISION["rollout"])
    found = outcome(where, system, simulate_rollout(where, system)).decision_ms
    assert found is not None, "the coordinator decided"
    return found


def progress(name: str, outcome: RolloutOutcome) -> None:
    """Show a run that ended."""
    system = outcome.system
    sys.stderr.write(
        f"{outcome.limit} {name} η={system.staleness} {system.rollout_gpus}: "
        f"{outcome.throughput:,.0f}\n"
    )


def outcome_rows(name: str, found: BySeed) -> list[Row]:
    """A row per limit and bound of a system: means over the seeds."""
    rows: list[Row] = []
    for seeds in zip(*found.values(), strict=True):
        first = seeds[0]
        rates = [each.throughput for each in seeds]
        rows.append(
            (
                f"{first.limit:,}",
                name if name in ("sync", "one-step") else f"{name} η={first.system.staleness}",
                f"{first.system.rollout_gpus or CLUSTER['gpus']}",
                f"{fmean(rates):,.0f} ±{stdev(rates):,.0f}",
                f"{fmean(each.step_s for each in seeds):,.0f}",
                f"{fmean(each.staleness_mean for each in seeds):.2f}, at most "
                f"{max(each.staleness_max for each in seeds)}",
                " / ".join(
                    f"{fmean(parts):.0%}"
                    for parts in (
                        [each.decode for each in seeds],
                        [each.prefill for each in seeds],
                    )
                ),
                f"{fmean(each.train for each in seeds):.0%}",
                f"{fmean(each.prefills for each in seeds):.2f}",
            )
        )
    return rows


def gains(ours: Sequence[RolloutOutcome], others: Sequence[RolloutOutcome]) -> list[float]:
    """Throughput of each of our runs by that of the other system with the same limit, and with the
    same η if the other has a choice."""
    has_choice = len(others) == len(ours)
    return [
        one.throughput / other.throughput
        for one in ours
        for other in others
        if other.limit == one.limit
        and (not has_choice or other.system.staleness == one.system.staleness)
    ]


def gain_rows(found: Mapping[str, BySeed], figures: dict[str, float]) -> list[Row]:
    """A row per system that StaleFlow is compared with; adds its figures."""
    rows: list[Row] = []
    for over in [name for name in found if name != "staleflow"]:
        ratios = [gains(found["staleflow"][seed], found[over][seed]) for seed in SEEDS]
        means = [fmean(of_seed) for of_seed in ratios]
        largest = max(fmean(of_setting) for of_setting in zip(*ratios, strict=True))
        name = f"gain_vs_{over.replace('-', '_')}"
        figures |= {
            name: fmean(means),
            f"{name}_largest": largest,
            f"{name}_spread": stdev(means),
        }
        paper = "paper: {:.2f}, ≤{:.2f}".format(*PUBLISHED[over]) if over in PUBLISHED else ""
        gain = f"{fmean(means):.2f} ±{stdev(means):.3f}"
        rows.append(("gain over", over, "", gain, f"≤{largest:.2f}", paper, "", "", ""))
    return rows


def ablation_rows(found: BySeed, figures: dict[str, float]) -> list[Row]:
    """A row per subset: its throughput by that of the vanilla strategies; adds its figures."""
    rows: list[Row] = []
    for at, first in enumerate(found[SEEDS[0]]):
        ratios = [seed[at].throughput / seed[0].throughput for seed in found.values()]
        label = first.system.strategies.label
        figures |= {
            f"ablation_{label}": fmean(ratios),
            f"ablation_{label}_spread": stdev(ratios),
        }
        ratio = f"{fmean(ratios):.3f} ±{stdev(ratios):.3f}"
        rows.append(("by vanilla", label, f"{first.system.rollout_gpus}", ratio, *[""] * 5))
    return rows


def main() -> None:
    """Run all systems, then the ablations, then the decision."""
    given = [word for word in sys.argv[1:] if word.startswith("--workers=")]
    with runner(int(given[0].partition("=")[2]) if given else None) as run:
        found = compare_systems(run)
        subsets = ablation(run)
    median, high = decision_ms()
    figures: dict[str, float] = {}
    rows = [row for name, outcomes in found.items() for row in outcome_rows(name, outcomes)]
    rows += gain_rows(found, figures)
    rows += ablation_rows(subsets, figures)
    figures |= {"decision_ms": high, "decision_ms_median": median}
    rows.append(("decision", "p99, median", "", f"{high:.0f} ms", f"{median:.0f} ms", *[""] * 4))
    report("Rollout coordination under a staleness bound, simulated", COLUMNS, rows, figures)


if __name__ == "__main__":
    main()
