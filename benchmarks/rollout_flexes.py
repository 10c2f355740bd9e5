"""Measures Flexes' on-policy rollouts on simulated engines, beside the synchronous baseline.

    python -m benchmarks.rollout_flexes [--quick] [--json] [--workers=N]

The settings of Flexes §6: Qwen2.5 7B, 14B and 32B on 16, 32 and 64 H800 GPUs, at most 8192, 16 384
and 32 768 tokens, 128 prompts of 8 responses, 40 steps, η = 1.25, rewards of a mix of math, code
and judged prompts. `tail_*` and `all_*` are the time of the synchronous baseline, with rewards
after the rollout, by that of tail batching alone, and with all parts: in the same run, on the same
GPUs, for the same prompts, each of which both train once. Means over seeds of the lengths, with
their standard deviation. `eta_*` are rollout times of short and long rounds by those of the
baseline (Flexes Fig. 11), for more prompts, more responses, or both. All figures follow from the
model of docs/simulating_rollouts.md, and are the same on every machine.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.latency.models import QWEN25_7B, QWEN25_14B, QWEN25_32B, Model
from plexrl.sim.rollout.engine.rewards import AT_ONCE, MIXED
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.runs.split import Runner, runner
from plexrl.sim.rollout.setting import Parts, Setting, System, SystemName
from plexrl.sim.rollout.workload import R1, RolloutWorkload

Row = tuple[str, ...]
Question = tuple[Setting, System]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A setting of Flexes §6, and its speed-ups (Tab. 2) by the letters of the parts."""

    name: str
    model: Model
    gpus: int
    tensor_parallel: int
    limit: int
    speedups: Mapping[str, float]


PUBLISHED = (
    Published(
        name="7b",
        model=QWEN25_7B,
        gpus=16,
        tensor_parallel=1,
        limit=8192,
        speedups={"T": 1.30, "TR": 2.01, "TRP": 2.01, "TRPS": 2.03, "RS": 2.03 / 1.14},
    ),
    Published(
        name="14b",
        model=QWEN25_14B,
        gpus=32,
        tensor_parallel=2,
        limit=16_384,
        speedups={"T": 1.48, "TR": 1.99, "TRP": 2.02, "TRPS": 2.22, "RS": 2.22 / 1.68},
    ),
    Published(
        name="32b",
        model=QWEN25_32B,
        gpus=64,
        tensor_parallel=2,
        limit=32_768,
        speedups={"T": 2.21, "TR": 2.48, "TRP": 2.52, "TRPS": 2.56, "RS": 2.56 / 2.24},
    ),
)
"""`RS` is RLHFuse with the stream trainer, as the paper strengthens it (§6.1)."""
FIGURES = {"T": "tail", "TR": "rewards", "TRP": "planner", "TRPS": "all"}
"""Names of the figures of the parts in the order of Tab. 2."""
SEEDS = sized((0, 1, 2), quick=(0, 1))
STEPS = sized(40, quick=5)
BATCH = sized(128, quick=8)
GROUP = sized(8, quick=4)
GPU_SHARE = sized(1, quick=8)
"""A smoke test has as many responses for each GPU as the others."""
SYNC = System(name=SystemName.SYNC)
FACTORS = sized((1.0, 1.25, 1.5), quick=(1.0, 1.25))
COLUMNS = (
    *("setting", "system", "speed-up", "paper", "rollout s", "rewards s", "training s"),
    *("not trained", "tokens"),
)


def setting(case: Published, seed: int) -> Setting:
    """The paper's setting."""
    return Setting(
        gpus=case.gpus // GPU_SHARE,
        batch_groups=BATCH,
        workload=RolloutWorkload(
            lengths=R1, scale=1.0, limit=case.limit, group_size=GROUP, seed=seed
        ),
        costs=case.model.costs(case.tensor_parallel),
        model=case.model,
        rewards=MIXED,
        steps=STEPS,
        warmup_steps=0,
        cycle_s=5.0,
    )


def flexes(
    letters: str, over_launch_prompts: float = 1.25, over_launch_responses: float = 1.25
) -> System:
    """Flexes with those of its parts whose letters are given."""
    return System(
        name=SystemName.FLEXES,
        parts=Parts(
            tail="T" in letters,
            rewards="R" in letters,
            parallelism="P" in letters,
            stream="S" in letters,
        ),
        over_launch_prompts=over_launch_prompts,
        over_launch_responses=over_launch_responses,
        fixed_over_launch=True,
    )


def answers(run: Runner, asked: Sequence[Question]) -> list[RolloutOutcome]:
    """The outcomes, in the order of the questions."""
    found = []
    futures = [run.outcome(*each) for each in asked]
    for (where, _), future in zip(asked, futures, strict=True):
        found.append(future.result())
        sys.stderr.write(f"{where.gpus} GPUs {found[-1].system.label}: {found[-1].run_s:,.0f} s\n")
    return found


def speedups(
    run: Runner, settings: Sequence[Setting], systems: Sequence[System]
) -> list[list[RolloutOutcome]]:
    """The outcomes of each system, and of the baseline before them, in each setting."""
    everything = [SYNC, *systems]
    found = answers(run, [(each, system) for system in everything for each in settings])
    size = len(settings)
    return [found[at * size : (at + 1) * size] for at in range(len(everything))]


def mean(values: Sequence[float]) -> str:
    """Mean and standard deviation over the seeds."""
    return f"{fmean(values):.2f} ±{stdev(values):.2f}"


def table_rows(run: Runner, case: Published, figures: dict[str, float]) -> list[Row]:
    """The parts in the order of Tab. 2, and some of them alone; adds their figures."""
    letters = [*FIGURES, "R", "RS"]
    settings = [setting(case, seed) for seed in SEEDS]
    base, *others = speedups(run, settings, [flexes(each) for each in letters])
    rows: list[Row] = []
    for label, found in zip(["sync", *letters], [base, *others], strict=True):
        ratios = [sync.run_s / each.run_s for sync, each in zip(base, found, strict=True)]
        if label in FIGURES:
            name = f"{FIGURES[label]}_{case.name}"
            figures |= {name: fmean(ratios), f"{name}_spread": stdev(ratios)}
        paper = case.speedups.get(label)
        seconds = [fmean(each.run_s for each in found) / STEPS]
        seconds += [fmean(each.rollout_s for each in found)]
        seconds += [fmean(each.reward_s for each in found)]
        rows.append(
            (
                case.name,
                label,
                mean(ratios),
                "" if paper is None else f"{paper:.2f}",
                f"{seconds[1]:.0f}",
                f"{seconds[2]:.0f}",
                f"{seconds[0] - seconds[1] - seconds[2]:.0f}",
                f"{fmean(each.untrained for each in found):.0%}",
                f"{fmean(each.response_tokens for each in found):,.0f}",
            )
        )
    step_s = fmean(each.run_s for each in base) / STEPS
    figures[f"sync_rollout_part_{case.name}"] = fmean(each.rollout_s for each in base) / step_s
    figures[f"sync_reward_part_{case.name}"] = fmean(each.reward_s for each in base) / step_s
    return rows


def eta_rows(run: Runner, case: Published, figures: dict[str, float]) -> list[Row]:
    """Rollout times of tail batching by those of the baseline; adds their figures."""
    pairs = [(factor, 1.0) for factor in FACTORS[1:]] + [(1.0, factor) for factor in FACTORS[1:]]
    pairs += [(factor, factor) for factor in FACTORS[1:]]
    settings = [setting(case, seed) for seed in SEEDS]
    base, *others = speedups(run, settings, [flexes("T", *pair) for pair in pairs])
    rows: list[Row] = []
    for (prompts, responses), found in zip(pairs, others, strict=True):
        parts = [each.rollout_s / sync.rollout_s for sync, each in zip(base, found, strict=True)]
        figures[f"eta_{case.name}_prompts_{prompts:g}_responses_{responses:g}"] = fmean(parts)
        label = f"η {prompts:g} prompts, {responses:g} responses"
        rollout_s = f"{fmean(each.rollout_s for each in found):.0f}"
        untrained = f"{fmean(each.untrained for each in found):.0%}"
        rows.append(
            (case.name, label, "", "", f"{rollout_s} ({mean(parts)})", "", "", untrained, "")
        )
    return rows


def changed(where: Setting) -> dict[str, Setting]:
    """The setting under other assumptions."""
    model = where.model
    assert model is not None, "the paper's settings have a model"
    fast = replace(model, train_part=0.4).costs(where.costs.gpus)
    return {
        "correlation 0.5": replace(where, workload=replace(where.workload, correlation=0.5)),
        "correlation 0": replace(where, workload=replace(where.workload, correlation=0.0)),
        "training at 40 % of the peak": replace(where, costs=fast),
        "rewards at once": replace(where, rewards=AT_ONCE),
        "half the KV cache": replace(
            where, costs=replace(where.costs, kv_tokens=where.costs.kv_tokens // 2), model=None
        ),
    }


def sensitivity_rows(run: Runner, case: Published, figures: dict[str, float]) -> list[Row]:
    """Speed-ups under other assumptions; adds their figures."""
    rows: list[Row] = []
    names = list(changed(setting(case, SEEDS[0])))
    for name in names:
        settings = [changed(setting(case, seed))[name] for seed in SEEDS]
        base, *others = speedups(run, settings, [flexes("T"), flexes("TRS")])
        for label, found in zip(("T", "TRS"), others, strict=True):
            ratios = [sync.run_s / each.run_s for sync, each in zip(base, found, strict=True)]
            key = name.replace(" ", "_").replace("%", "percent")
            figures[f"{case.name}_{label}_{key}"] = fmean(ratios)
            rows.append((case.name, f"{label}, {name}", mean(ratios), *[""] * 6))
    return rows


def main() -> None:
    """Run the table, then η, then other assumptions."""
    given = [word for word in sys.argv[1:] if word.startswith("--workers=")]
    figures: dict[str, float] = {}
    rows: list[Row] = []
    with runner(int(given[0].partition("=")[2]) if given else None) as run:
        for part in (table_rows, eta_rows, sensitivity_rows):
            for case in PUBLISHED:
                rows += part(run, case, figures)
    report("On-policy rollouts with tail batching, simulated", COLUMNS, rows, figures)


if __name__ == "__main__":
    main()
