"""Modes of rollouts do not lose to the plain loop where they once did, at the size of those runs
(`benchmarks/rollout_modes.py`)."""

from dataclasses import replace

from plexrl.latency.gpus import GPUS
from plexrl.latency.models import MODELS
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import Setting, Strategies, System, SystemName
from plexrl.sim.rollout.workload import RolloutWorkload


def setting(name: str, gpu: str, tensor_parallel: int, prompts: int, limit: int) -> Setting:
    """16 GPUs, 8 responses to a prompt with lengths as those of R1, and 4 steps."""
    model = replace(MODELS[name], gpu=GPUS[gpu], train_part=0.4)
    return Setting(
        gpus=16,
        batch_groups=prompts,
        workload=RolloutWorkload(
            lengths="r1-long", scale=limit / 20_000, limit=limit, group_size=8
        ),
        costs=model.costs(tensor_parallel),
        model=model,
        steps=4,
        warmup_steps=0,
    )


def run(case: Setting, system: System) -> RolloutOutcome:
    return outcome(case, system, simulate_rollout(case, system))


def test_work_does_not_move_where_computing_its_kv_cache_again_costs_more_than_it_gains() -> None:
    """Three instances, whose last responses end within seconds: migration lost 7.6 %."""
    case = setting("qwen2.5-7b", "h20", 1, 16, 5_000)
    bounded = System(name=SystemName.STALEFLOW, staleness=1, rollout_gpus=3)
    vanilla = Strategies(routing=False, synchronization=False, migration=False)
    plain = run(case, replace(bounded, strategies=vanilla))
    migrating = run(case, replace(bounded, strategies=replace(vanilla, migration=True)))
    assert migrating.throughput >= 0.98 * plain.throughput
    assert run(case, bounded).throughput >= 0.98 * plain.throughput
