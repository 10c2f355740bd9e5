"""Whether a mode of asynchronous rollouts loses against the plain loop, over models and batches.

    python -m benchmarks.rollout_modes [--quick] [--json]

Simulated with the live decisions; each mode where its own gate lets it act, relative to the same
without it, in the same setting and of the same seed:

* `length_aware`: runs of the coordinator with ranks, by recall, over those without;
* `tail`: tail batching over the synchronous loop, in the time for the same prompts;
* `adaptive_tp`: PAT over the best static size of tensor-parallel groups;
* `routing`: trajectories routed by the cost model, over the vanilla strategies, in tokens a second
  at one step of staleness with the split of GPUs that a bound of the throughput chooses.

`least_*` is the smallest ratio of a mode.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.latency.gpus import GPUS
from plexrl.latency.models import MODELS, Model
from plexrl.sim.rollout.results.bound import throughput_bound
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import NO_PARTS, Setting, Strategies, System, SystemName
from plexrl.sim.rollout.workload import RolloutWorkload

MODES = ("length_aware", "tail", "adaptive_tp", "routing")
CASES = sized(
    (
        ("qwen2.5-7b", "h800", 1, 16),
        ("qwen2.5-7b", "h20", 1, 16),
        ("qwen2.5-14b", "h20", 2, 16),
        ("qwen2.5-32b", "h800", 4, 32),
    ),
    quick=(("qwen2.5-7b", "h800", 1, 4),),
)
"""Model, GPU, least size of tensor-parallel groups, and number of GPUs."""
PROMPTS = sized((16, 64), quick=(4,))
LIMITS = sized(((5_000, 0.25), (20_000, 1.0)), quick=((1_000, 0.05),))
"""Longest response, and the scale of the lengths, which then have the same shape."""
RECALLS = sized((0.5, 0.71, 0.87, 1.0), quick=(0.71,))
RESPONSES = 8
STEPS = sized(4, quick=2)
TRAIN_PART = 0.4
PLAIN = System(name=SystemName.FLEXES, parts=NO_PARTS)
VANILLA = Strategies(routing=False, synchronization=False, migration=False)
COLUMNS = ("model", "GPU", "prompts", "limit", *MODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the sweep."""

    name: str
    gpu: str
    tensor_parallel: int
    gpus: int
    prompts: int
    limit: int
    scale: float

    @property
    def model(self) -> Model:
        """The model on these GPUs."""
        return replace(MODELS[self.name], gpu=GPUS[self.gpu], train_part=TRAIN_PART)

    def setting(self, tensor_parallel: int, responses: int = RESPONSES) -> Setting:
        """With groups of this size."""
        return Setting(
            gpus=self.gpus,
            batch_groups=self.prompts * RESPONSES // responses,
            workload=RolloutWorkload(
                lengths="r1-long", scale=self.scale, limit=self.limit, group_size=responses
            ),
            costs=self.model.costs(tensor_parallel),
            model=self.model,
            steps=STEPS,
            warmup_steps=0,
        )


def run(setting: Setting, system: System) -> RolloutOutcome:
    """One run."""
    return outcome(setting, system, simulate_rollout(setting, system))


def length_aware(case: Case) -> list[float]:
    """By recall. One response to a prompt, so that the batch's lengths differ most."""
    setting = case.setting(case.tensor_parallel, responses=1)
    plain = run(setting, PLAIN)
    ranked = [System(name=SystemName.STREAMRL_SKEW, recall=recall) for recall in RECALLS]
    return [plain.run_s / run(setting, system).run_s for system in ranked]


def tail(case: Case) -> list[float]:
    """The same prompts."""
    setting = case.setting(case.tensor_parallel)
    plain = run(setting, System(name=SystemName.SYNC))
    return [plain.run_s / run(setting, System(name=SystemName.TAIL)).run_s]


def adaptive_tp(case: Case) -> list[float]:
    """From the size that begins best; static groups have any size."""
    sizes = [tp for tp in case.model.sizes(case.limit) if tp <= case.gpus]
    settings = [case.setting(tp) for tp in sizes]
    static = min(run(setting, System(name=SystemName.SYNC)).run_s for setting in settings)
    switching = min(run(setting, System(name=SystemName.PAT)).run_s for setting in settings)
    return [static / switching]


def routing(case: Case) -> list[float]:
    """With rollout GPUs and others that train."""
    setting = case.setting(case.tensor_parallel)
    splits = range(case.tensor_parallel, case.gpus, case.tensor_parallel)
    split = max(splits, key=lambda gpus: throughput_bound(setting, gpus))
    bounded = System(name=SystemName.STALEFLOW, staleness=1, rollout_gpus=split)
    vanilla = run(setting, replace(bounded, strategies=VANILLA))
    return [run(setting, bounded).throughput / vanilla.throughput]


MEASURES: dict[str, Callable[[Case], list[float]]] = {
    "length_aware": length_aware,
    "tail": tail,
    "adaptive_tp": adaptive_tp,
    "routing": routing,
}


def measured(asked: tuple[str, Case]) -> list[float]:
    """The ratios of a mode in a case."""
    mode, case = asked
    return MEASURES[mode](case)


def cases() -> Iterator[Case]:
    """All rows."""
    for name, gpu, tensor_parallel, gpus in CASES:
        for prompts in PROMPTS:
            for limit, scale in LIMITS:
                yield Case(
                    name=name,
                    gpu=gpu,
                    tensor_parallel=tensor_parallel,
                    gpus=gpus,
                    prompts=prompts,
                    limit=limit,
                    scale=scale,
                )


def main() -> None:
    """Print the table."""
    rows = list(cases())
    asked = [(mode, case) for case in rows for mode in MODES]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(asked, pool.map(measured, asked), strict=True))
    table = [
        (
            case.name,
            case.gpu,
            f"{case.prompts} x {RESPONSES}",
            f"{case.limit:,}",
            *(", ".join(f"{ratio:.2f}" for ratio in found[mode, case]) for mode in MODES),
        )
        for case in rows
    ]
    figures = {f"least_{mode}": min(min(found[mode, case]) for case in rows) for mode in MODES}
    report("Modes of rollouts over the plain loop", COLUMNS, table, figures)


if __name__ == "__main__":
    main()
