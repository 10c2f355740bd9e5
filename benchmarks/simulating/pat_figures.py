"""PAT's part of `benchmarks/rollout_streamrl_pat.py`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, stdev

from benchmarks.sizes import sized
from plexrl.latency.gpus import A40, H100, Gpu
from plexrl.latency.models import LLAMA31_8B, QWEN3_14B, Model
from plexrl.sim.rollout.results.recorder import Recorder
from plexrl.sim.rollout.runs.split import Runner
from plexrl.sim.rollout.setting import Ends, Setting, System, SystemName
from plexrl.sim.rollout.workload import DEEPSCALER, Prompts, RolloutWorkload

Row = tuple[str, ...]

TRAIN_PARTS = {"H100": 0.127, "A40": 0.4}
"""Part of the peak at which everything beside generation computes. On H100 it takes 38.2 and 57.5 s
of a step (PAT §5.3, Fig. 11). On A40 generation takes 64.2 to 81.7 % of a step with at most 6144 to
16 384 tokens (§2.3), here 67 to 79 %."""
PROMPT_TOKENS = 150
"""An assumption; it does not matter beside the responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setting of PAT §5, and its speed-ups."""

    model: Model
    gpu: Gpu
    gpus: int
    limit: int
    paper: str = ""
    """Gain of the whole step."""

    @property
    def name(self) -> str:
        """Model, GPUs and limit."""
        return f"{self.model.name}, {self.gpus} {self.gpu.name}, {self.limit // 1024}K"

    @property
    def trained(self) -> Model:
        """The model on its GPUs."""
        return replace(self.model, gpu=self.gpu, train_part=TRAIN_PARTS[self.gpu.name])


HEADLINE = Case(model=LLAMA31_8B, gpu=H100, gpus=8, limit=24_576, paper="1.37")
CASES = sized(
    (
        Case(model=LLAMA31_8B, gpu=A40, gpus=8, limit=6144, paper="1.05"),
        Case(model=LLAMA31_8B, gpu=A40, gpus=8, limit=16_384, paper="1.27"),
        Case(model=LLAMA31_8B, gpu=A40, gpus=16, limit=16_384, paper="up to 1.19"),
        Case(model=QWEN3_14B, gpu=A40, gpus=16, limit=16_384, paper="1.18"),
        HEADLINE,
        Case(model=QWEN3_14B, gpu=H100, gpus=8, limit=16_384, paper="1.29"),
    ),
    quick=(Case(model=LLAMA31_8B, gpu=A40, gpus=8, limit=6144, paper="1.05"),),
)
SEEDS = sized((0, 1, 2), quick=(0, 1))
STEPS = sized(4, quick=2)
RARE_STEPS = sized(6, quick=2)
"""Steps with the highest limit, which only every other batch reaches."""
BATCH = sized(128, quick=32)
STATIC = System(name=SystemName.SYNC)
ADAPTIVE = System(name=SystemName.PAT)
LIMIT = System(name=SystemName.PAT, ends=Ends.LIMIT)
ORACLE = System(name=SystemName.PAT, ends=Ends.KNOWN)


@dataclass(frozen=True, slots=True)
class Times:
    """Mean seconds of the steps in which a response reaches the limit."""

    generation_s: float
    step_s: float


def setting(case: Case, seed: int, tp: int, model: Model) -> Setting:
    """The paper's setting."""
    return Setting(
        gpus=case.gpus,
        batch_groups=BATCH,
        workload=RolloutWorkload(
            lengths=DEEPSCALER,
            scale=1.0,
            limit=case.limit,
            group_size=1,
            prompt_tokens=PROMPT_TOKENS,
            seed=seed,
        ),
        costs=model.costs(tp),
        model=model,
        steps=RARE_STEPS if case.limit > 16_384 else STEPS,
        warmup_steps=0,
    )


def times(where: Setting, recorder: Recorder) -> Times:
    """Of the steps that the paper counts; of all if there are none."""
    found, all_steps, begin_s = [], [], 0.0
    for step in recorder.steps:
        each = Times(step.start_s - begin_s, step.end_s - begin_s)
        all_steps.append(each)
        if _longest(where.workload, step.version) == where.workload.limit:
            found.append(each)
        begin_s = step.end_s
    counted = found or all_steps
    return Times(
        fmean(each.generation_s for each in counted), fmean(each.step_s for each in counted)
    )


@lru_cache(maxsize=4096)
def _longest(workload: RolloutWorkload, step: int) -> int:
    prompts = Prompts(workload)
    return max(
        prompts.group(at)[0].response_tokens for at in range(BATCH * step, BATCH * (step + 1))
    )


def measured(
    run: Runner, case: Case, model: Model, seeds: Sequence[int] = SEEDS
) -> dict[str, list[Times]]:
    """By kind of engine: each static size, `pat`, `limit` (which assumes the limit, as the paper)
    and `oracle`; by seed. The latter three begin with the one of the two best static sizes that is
    better for the first seed."""
    sizes = model.sizes(case.limit + PROMPT_TOKENS)
    static = {f"tp{tp}": (STATIC, tp) for tp in sizes}
    found = _by_seed(run, case, model, static, seeds)
    near = sorted(sizes, key=lambda tp: found[f"tp{tp}"][0].generation_s)[:2]
    adaptive = {}
    for kind, system in (("pat", ADAPTIVE), ("limit", LIMIT), ("oracle", ORACLE)):
        tried = {str(tp): (system, tp) for tp in near}
        first = _by_seed(run, case, model, tried, seeds[:1])
        adaptive[kind] = (system, min(near, key=lambda tp: first[str(tp)][0].generation_s))
    return found | _by_seed(run, case, model, adaptive, seeds)


def _by_seed(
    run: Runner,
    case: Case,
    model: Model,
    kinds: dict[str, tuple[System, int]],
    seeds: Sequence[int],
) -> dict[str, list[Times]]:
    asked = [
        (kind, setting(case, seed, tp, model), system)
        for kind, (system, tp) in kinds.items()
        for seed in seeds
    ]
    futures = [run.history(where, system) for _, where, system in asked]
    found: dict[str, list[Times]] = {}
    for (kind, where, _), future in zip(asked, futures, strict=True):
        each = times(where, future.result())
        sys.stderr.write(f"{case.name} {kind}: {each.generation_s:,.0f} s\n")
        found.setdefault(kind, []).append(each)
    return found


def best_static(found: dict[str, list[Times]]) -> str:
    """The size with the least generation time, as the paper tunes its baseline."""
    static = [kind for kind in found if kind.startswith("tp")]
    return min(static, key=lambda kind: fmean(each.generation_s for each in found[kind]))


def cuts(base: Sequence[Times], found: Sequence[Times]) -> list[float]:
    """Part of the generation time that is saved, by seed."""
    pairs = zip(base, found, strict=True)
    return [1.0 - each.generation_s / one.generation_s for one, each in pairs]


def pat_rows(run: Runner, figures: dict[str, float]) -> list[Row]:
    """Fig. 10 and 11."""
    rows: list[Row] = []
    gains, regrets, limit_regrets = [], [], []
    for case in CASES:
        found = measured(run, case, case.trained)
        best = best_static(found)
        for kind, seeds in found.items():
            pairs = zip(found[best], seeds, strict=True)
            values = [one.step_s / each.step_s for one, each in pairs]
            gain = f"{fmean(values):.2f} ±{stdev(values):.2f}"
            generation_s = [each.generation_s for each in seeds]
            step_s = fmean(each.step_s for each in seeds)
            rows.append(
                (
                    case.name,
                    f"{kind}, best" if kind == best else kind,
                    gain,
                    case.paper if kind == "pat" else "",
                    f"{fmean(generation_s):.0f} ±{stdev(generation_s):.0f}",
                    f"{step_s - fmean(generation_s):.0f}",
                    f"{step_s:.0f}",
                    f"{case.gpus}",
                )
            )
            if kind == "pat":
                gains.append(fmean(values))
        regrets.append(-fmean(cuts(found["oracle"], found["pat"])))
        limit_regrets.append(-fmean(cuts(found["oracle"], found["limit"])))
        if case in (HEADLINE, CASES[-1]):
            _add_cuts(found, best, "" if case == HEADLINE else "_14b", figures)
    figures |= {
        "pat_gain_min": min(gains),
        "pat_gain_max": max(gains),
        "pat_regret": fmean(regrets),
        "pat_regret_max": max(regrets),
        "pat_limit_regret": fmean(limit_regrets),
        "pat_limit_regret_max": max(limit_regrets),
    }
    return rows


def _add_cuts(
    found: dict[str, list[Times]], best: str, ending: str, figures: dict[str, float]
) -> None:
    for base, name in ((best, ""), ("tp2", "_tp2")):
        values = cuts(found[base], found["pat"])
        figures[f"pat_generation_cut{name}{ending}"] = fmean(values)
        figures[f"pat_generation_cut{name}{ending}_spread"] = stdev(values)
    for kind, seeds in (("tp2", found["tp2"]), ("pat", found["pat"])):
        figures[f"{kind}_generation_s{ending}"] = fmean(each.generation_s for each in seeds)


def _changed(model: Model) -> dict[str, Model]:
    """The model under other assumptions."""
    gpu = model.gpu
    software, switching = gpu.software, gpu.switching
    kinds = {
        "nothing": gpu,
        "free switches": replace(
            gpu, switching=replace(switching, fixed_s=0.0, kv_bytes_per_s=1e15)
        ),
        "KV cache read at 34 %": replace(gpu, software=replace(software, kv_read=0.34)),
        "a fifth of the link": replace(gpu, link=gpu.link / 5),
        "a twentieth of the link": replace(gpu, link=gpu.link / 20),
        "60 µs an all-reduce": replace(gpu, software=replace(software, all_reduce_s=60e-6)),
    }
    return {name: replace(model, gpu=each) for name, each in kinds.items()}


def pat_sensitivity_rows(run: Runner, figures: dict[str, float]) -> list[Row]:
    """The headline under other assumptions, with the first seed."""
    case = CASES[-2] if len(CASES) > 1 else CASES[0]
    rows: list[Row] = []
    for name, model in _changed(case.trained).items():
        found = measured(run, case, model, SEEDS[:1])
        best = best_static(found)
        over_best, over_two = (cuts(found[base], found["pat"]) for base in (best, "tp2"))
        key = name.replace(" ", "_").replace("%", "percent").replace("µ", "u")
        figures[f"pat_cut_with_{key}"] = fmean(over_best)
        generation_s = " / ".join(
            f"{fmean(each.generation_s for each in found[kind]):.0f}" for kind in found
        )
        rows.append(
            (
                f"{case.name}, {name}",
                f"cut over {best}, over tp2",
                f"{fmean(over_best):.0%}, {fmean(over_two):.0%}",
                "34.6 %",
                generation_s,
                *[""] * 3,
            )
        )
    return rows
