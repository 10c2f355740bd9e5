"""StreamRL's part of `benchmarks/rollout_streamrl_pat.py`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean, stdev

from benchmarks.sizes import sized
from plexrl.latency.models import (
    PPO_OPERATIONS,
    QWEN25_7B,
    QWEN25_32B,
    QWEN25_72B,
    Model,
)
from plexrl.rollout.policies.allocation import Stage, split
from plexrl.sim.rollout.plan.allocation import batch_s
from plexrl.sim.rollout.results.bound import throughput_bound
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.runs.split import Runner, best_splits
from plexrl.sim.rollout.setting import FIXED_STALENESS, Setting, System, SystemName
from plexrl.sim.rollout.workload import DEEPSCALER, R1, R1_LONG, RolloutWorkload, earlier_batch

Row = tuple[str, ...]
Question = tuple[Setting, System]

TRAIN_PART = 0.4
"""Part of the peak at which Megatron-LM trains, as in the default costs: an assumption."""
RECALL = 0.87
"""Of the paper's largest ranker (Tab. 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its GPUs, whose number the paper does not give, and the sizes that are tried."""

    name: str
    model: Model
    gpus: int
    sizes: tuple[int, ...]


def ppo(model: Model) -> Model:
    """The model as the paper trains it."""
    return replace(model, train_part=TRAIN_PART, train_operations=PPO_OPERATIONS)


CASES = sized(
    (
        Case(name="7b", model=ppo(QWEN25_7B), gpus=32, sizes=(1, 2, 4)),
        Case(name="32b", model=ppo(QWEN25_32B), gpus=64, sizes=(2, 4, 8)),
        Case(name="72b", model=ppo(QWEN25_72B), gpus=128, sizes=(4, 8)),
    ),
    quick=(Case(name="7b", model=ppo(QWEN25_7B), gpus=8, sizes=(1, 2)),),
)
SCALES = sized({5000: 0.25, 10_000: 0.5, 20_000: 1.0}, quick={5000: 0.25})
"""Factor on lengths by limit (§7)."""
SEEDS = sized((0, 1, 2), quick=(0, 1))
BATCH = sized(1024, quick=48)
STEPS = sized(12, quick=4)
SYSTEMS = {
    "skew": SystemName.STREAMRL_SKEW,
    "sync": SystemName.STREAMRL_SYNC,
    "async": SystemName.STREAMRL_ASYNC,
}
BASELINE = System(name=SystemName.SYNC)
TABLE_3 = {"skew": 1.08, "sync": 1.23, "async": 1.48}
RANGES = {"skew": "", "sync": "1.06 to 1.41", "async": "1.30 to 2.66"}
"""Gains of the paper over models and lengths (§7.1). Its text leaves open over which baseline the
asynchronous ones are."""


def setting(case: Case, limit: int, seed: int, tp: int) -> Setting:
    """The paper's setting."""
    return Setting(
        gpus=case.gpus,
        batch_groups=BATCH,
        workload=RolloutWorkload(
            lengths=R1_LONG, scale=SCALES[limit], limit=limit, group_size=1, seed=seed
        ),
        costs=case.model.costs(tp),
        model=case.model,
        steps=STEPS,
        warmup_steps=2,
    )


def system(name: SystemName, recall: float = RECALL, rollout_gpus: int = 0) -> System:
    """One of StreamRL's systems."""
    return System(
        name=name, staleness=FIXED_STALENESS[name], recall=recall, rollout_gpus=rollout_gpus
    )


def answers(run: Runner, asked: Sequence[Question]) -> list[RolloutOutcome]:
    """The outcomes, in the order of the questions."""
    return best_splits(run.outcome, asked, on_run=_show)


def _show(each: RolloutOutcome) -> None:
    text = f"{each.limit} {each.system.label} {each.system.rollout_gpus}: {each.step_s:,.0f} s\n"
    sys.stderr.write(text)


def fastest_sizes(
    run: Runner, case: Case, limit: int, systems: Sequence[System]
) -> dict[System, int]:
    """The size with which each system is fastest on the first seed."""
    asked = list(product(systems, case.sizes))
    found = answers(run, [(setting(case, limit, SEEDS[0], tp), each) for each, tp in asked])
    best: dict[System, tuple[float, int]] = {}
    for (each, tp), outcome in zip(asked, found, strict=True):
        best[each] = min(best.get(each, (float("inf"), 0)), (outcome.step_s, tp))
    return {each: tp for each, (_, tp) in best.items()}


def seeds_of(
    run: Runner, case: Case, limit: int, systems: Mapping[System, int]
) -> dict[System, list[RolloutOutcome]]:
    """The outcomes of each system by seed."""
    asked = list(product(systems.items(), SEEDS))
    found = answers(run, [(setting(case, limit, seed, tp), each) for (each, tp), seed in asked])
    return {
        each: [found[at] for at, ((other, _), _) in enumerate(asked) if other == each]
        for each in systems
    }


def ratios(base: Sequence[RolloutOutcome], found: Sequence[RolloutOutcome]) -> list[float]:
    """Samples per second by those of the baseline, by seed."""
    return [one.step_s / each.step_s for one, each in zip(base, found, strict=True)]


def text(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{fmean(values):.2f} ±{stdev(values):.2f}"


def _row(
    name: str, label: str, gain: str, paper: str, found: Sequence[RolloutOutcome], tp: int | str
) -> Row:
    rollout_gpus = found[0].system.rollout_gpus
    gpus = f"{rollout_gpus} + {found[0].train_gpus}" if rollout_gpus else f"{found[0].train_gpus}"
    seconds = [
        fmean(each.rollout_s for each in found),
        fmean(each.train * each.step_s for each in found),
        fmean(each.step_s for each in found),
    ]
    return (name, label, gain, paper, *(f"{each:,.0f}" for each in seconds), f"{gpus}, {tp}")


def gain_rows(run: Runner, figures: dict[str, float]) -> list[Row]:
    """Fig. 8 and Table 3."""
    rows: list[Row] = []
    gains: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for case, limit in product(CASES, SCALES):
        systems = {name: system(each) for name, each in SYSTEMS.items()}
        sizes = fastest_sizes(run, case, limit, [BASELINE, *systems.values()])
        found = seeds_of(run, case, limit, sizes)
        where = f"{case.name}, {limit:,}"
        base = found[BASELINE]
        rows.append(_row(where, "sync", "1.00", "", base, sizes[BASELINE]))
        is_table_3 = (case, limit) == (CASES[-1], max(SCALES))
        for name, each in systems.items():
            values = ratios(base, found[each])
            gains[name].append(fmean(values))
            figures[f"{name}_{case.name}_{limit}"] = fmean(values)
            figures[f"{name}_{case.name}_{limit}_spread"] = stdev(values)
            paper = RANGES[name]
            if is_table_3:
                figures[f"breakdown_{name}"] = fmean(values)
                paper = f"{TABLE_3[name]:.2f}"
            rows.append(_row(where, name, text(values), paper, found[each], sizes[each]))
        bound = _bound(case, limit) / fmean(each.throughput for each in base)
        figures[f"bound_{case.name}_{limit}"] = bound
        rows.append((where, "no schedule gains more", f"{bound:.2f}", *[""] * 5))
    for name, values in gains.items():
        figures[f"{name}_min"] = min(values)
        figures[f"{name}_max"] = max(values)
    return rows


def _bound(case: Case, limit: int) -> float:
    """Tokens per second that no schedule with GPUs of its own for each stage exceeds."""
    return max(throughput_bound(setting(case, limit, SEEDS[0], tp)) for tp in case.sizes)


RANKS = {"ranker": RECALL, "plexrl": 0.71, "oracle": 1.0, "random": 0.2}


def dispatch_rows(run: Runner, figures: dict[str, float]) -> list[Row]:
    """Fig. 9: generation times by the quality of ranks, with the same size."""
    rows: list[Row] = []
    limit = max(SCALES)
    gains: dict[str, list[float]] = {name: [] for name in RANKS}
    for case in CASES:
        size = fastest_sizes(run, case, limit, [BASELINE])[BASELINE]
        kinds = {name: system(SystemName.STREAMRL_SKEW, recall) for name, recall in RANKS.items()}
        found = seeds_of(run, case, limit, dict.fromkeys([BASELINE, *kinds.values()], size))
        for name, each in kinds.items():
            pairs = zip(found[BASELINE], found[each], strict=True)
            values = [one.rollout_s / other.rollout_s for one, other in pairs]
            gains[name].append(fmean(values))
            rows.append(_row(f"dispatch, {case.name}", name, text(values), "", found[each], size))
    figures |= {f"dispatch_{name}": fmean(values) for name, values in gains.items()}
    return rows


def alg_1(where: Setting, unit: int) -> int:
    """GPUs for generation by StreamRL Alg. 1, a multiple of `unit`, without a run."""
    batch = earlier_batch(where.workload, where.batch_groups)
    tokens = sum(each.length + each.response_tokens for each in batch)
    found = split(
        Stage(
            seconds=lambda units: batch_s(where, units * unit // where.costs.gpus), unit_gpus=unit
        ),
        Stage(seconds=lambda units: where.costs.train_s(tokens, units * unit), unit_gpus=unit),
        where.gpus,
    )
    return found.instances * unit


def allocation_rows(run: Runner, figures: dict[str, float]) -> list[Row]:
    """Fig. 10: Alg. 1, an even split, and the best of all splits, one step ahead."""
    rows: list[Row] = []
    limit, name = max(SCALES), SystemName.STREAMRL_ASYNC
    gains, regrets = [], []
    for case in CASES[-2:]:
        size = fastest_sizes(run, case, limit, [system(name)])[system(name)]
        unit = max(case.gpus // 16, size)
        splits = [system(name, rollout_gpus=gpus) for gpus in range(unit, case.gpus, unit)]
        even = system(name, rollout_gpus=case.gpus // 2 // size * size)
        planned = system(name, rollout_gpus=alg_1(setting(case, limit, SEEDS[0], size), unit))
        found = seeds_of(run, case, limit, dict.fromkeys([planned, even, *splits], size))
        best = min(splits, key=lambda each: fmean(one.step_s for one in found[each]))
        chosen = found[planned]
        gain, regret = ratios(found[even], chosen), ratios(chosen, found[best])
        gains.append(fmean(gain))
        regrets.append(fmean(regret) - 1.0)
        where = f"split, {case.name}"
        rows.append(_row(where, "even", "1.00", "", found[even], size))
        rows.append(_row(where, "Alg. 1", text(gain), "up to 1.25", chosen, size))
        rows.append(
            _row(where, "best", text(ratios(found[even], found[best])), "", found[best], size)
        )
    figures |= {"allocation_gain": max(gains), "allocation_regret": max(regrets)}
    return rows


def _changed(case: Case, where: Setting) -> dict[str, Setting]:
    """The setting under other assumptions."""
    size, workload = where.costs.gpus, where.workload
    slow = replace(case.model, train_part=0.2)
    slowest = replace(case.model, train_part=0.077)
    gpu = case.model.gpu
    light = replace(
        case.model,
        gpu=replace(gpu, software=replace(gpu.software, layer_s=0.5 * gpu.software.layer_s)),
    )
    return {
        "nothing": where,
        "all lengths of R1": replace(where, workload=replace(workload, lengths=R1)),
        "half of the GPUs": replace(where, gpus=where.gpus // 2),
        "lengths of DeepScaleR": replace(where, workload=replace(workload, lengths=DEEPSCALER)),
        "60 s between the stages": replace(where, costs=replace(where.costs, pull_s=60.0)),
        "training at 20 % of the peak": replace(where, costs=slow.costs(size)),
        "training at 7.7 % of the peak": replace(where, costs=slowest.costs(size)),
        "half the time by layer": replace(where, costs=light.costs(size), model=light),
    }


def sensitivity_rows(run: Runner, figures: dict[str, float]) -> list[Row]:
    """Table 3 under other assumptions, with the size of the baseline."""
    case, limit = CASES[-1], max(SCALES)
    size = fastest_sizes(run, case, limit, [BASELINE])[BASELINE]
    rows: list[Row] = []
    names = list(_changed(case, setting(case, limit, SEEDS[0], size)))
    for name in names:
        found = {}
        for label, each in {"base": BASELINE, **{k: system(v) for k, v in SYSTEMS.items()}}.items():
            wheres = [_changed(case, setting(case, limit, seed, size))[name] for seed in SEEDS]
            found[label] = answers(run, [(where, each) for where in wheres])
        for label in SYSTEMS:
            values = ratios(found["base"], found[label])
            key = name.replace(" ", "_").replace("%", "percent").replace(".", "_")
            figures[f"{label}_with_{key}"] = fmean(values)
            rows.append(_row(f"{case.name}, {name}", label, text(values), "", found[label], size))
    return rows
