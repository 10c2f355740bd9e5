"""Measures how the gains of StaleFlow's rollout coordination depend on the assumptions.

    python -m benchmarks.simulating.rollout_sensitivity [--quick] [--json]

A quarter of the paper's setting: 32 GPUs of which 20 roll out, 32 prompts of 16 responses, at most
40 000 tokens, a staleness bound of 3. One assumption is changed at a time. A gain is the mean over
the seeds, with their standard deviation.
"""

from dataclasses import replace
from statistics import fmean, stdev

from benchmarks.report import report
from benchmarks.rollout_systems.rivals import Rival, split
from benchmarks.sizes import sized
from plexrl.latency.costs import EngineCosts
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import Setting, Strategies, System, SystemName
from plexrl.sim.rollout.workload import R1, RolloutWorkload

BOUND = 3
SEEDS = sized((0, 1, 2), quick=(0, 1))
CLUSTER = sized({"gpus": 32, "batch_groups": 32}, quick={"gpus": 8, "batch_groups": 4})
ROLLOUT_GPUS = sized(20, quick=5)
STEPS = sized(24, quick=8)
VANILLA = Strategies(routing=False, synchronization=False, migration=False)
STALEFLOW = split(BOUND, ROLLOUT_GPUS)
COSTS = EngineCosts()
VARIANTS = {
    "as the benchmark": (RolloutWorkload(), COSTS),
    "correlation 0": (RolloutWorkload(correlation=0.0), COSTS),
    "correlation 0.5": (RolloutWorkload(correlation=0.5), COSTS),
    "all lengths of R1": (RolloutWorkload(lengths=R1), COSTS),
    "half the training": (RolloutWorkload(), replace(COSTS, train_gpu_s_per_token=3.55e-4)),
    "half the KV cache": (RolloutWorkload(), replace(COSTS, kv_tokens=128_000)),
    "prefill without attention": (RolloutWorkload(), replace(COSTS, prefill_s_per_token2=0.0)),
    "three times the prefill": (
        RolloutWorkload(),
        replace(COSTS, prefill_s_per_token=2.7e-4, prefill_s_per_token2=1.6e-8),
    ),
}


def own_outcome(setting: Setting, system: System) -> RolloutOutcome:
    """The figures of a system of the simulator."""
    return outcome(setting, system, simulate_rollout(setting, system))


BASELINES = {
    "sync": (own_outcome, System(name=SystemName.SYNC)),
    "one-step": (Rival.ONE_STEP.outcome, split(1, ROLLOUT_GPUS)),
    "inflight": (Rival.INFLIGHT.outcome, STALEFLOW),
    "inflight-loose": (Rival.INFLIGHT_LOOSE.outcome, STALEFLOW),
    "vanilla": (own_outcome, replace(STALEFLOW, strategies=VANILLA)),
}


def gains(workload: RolloutWorkload, costs: EngineCosts) -> list[list[float]]:
    """Gains over each baseline, by seed."""
    found: list[list[float]] = [[] for _ in BASELINES]
    for seed in SEEDS:
        setting = Setting(
            gpus=CLUSTER["gpus"],
            batch_groups=CLUSTER["batch_groups"],
            workload=replace(workload, seed=seed),
            costs=costs,
            steps=STEPS,
            warmup_steps=4,
            cycle_s=5.0,
        )
        ours = own_outcome(setting, STALEFLOW).throughput
        for at, (run, system) in enumerate(BASELINES.values()):
            found[at].append(ours / run(setting, system).throughput)
    return found


def main() -> None:
    """Run all variants."""
    rows = []
    figures: dict[str, float] = {}
    names = tuple(BASELINES)
    for variant, (workload, costs) in VARIANTS.items():
        found = gains(workload, costs)
        rows.append((variant, *(f"{fmean(each):.2f} ±{stdev(each):.2f}" for each in found)))
        label = variant.replace(" ", "_")
        figures |= {
            f"gain_vs_{name}.{label}": fmean(each) for name, each in zip(names, found, strict=True)
        }
    report(
        "Gains of StaleFlow's coordination by assumption, simulated",
        ("changed", *(f"over {name}" for name in names)),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
