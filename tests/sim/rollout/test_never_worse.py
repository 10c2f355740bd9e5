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


def test_work_is_routed_by_the_lengths_to_which_it_grows() -> None:
    """In short steps of few trajectories, new ones gathered where others were short: 3.6 % lost."""
    case = setting("qwen2.5-7b", "h800", 1, 16, 20_000)
    bounded = System(name=SystemName.STALEFLOW, staleness=1, rollout_gpus=10)
    vanilla = Strategies(routing=False, synchronization=False, migration=False)
    plain = run(case, replace(bounded, strategies=vanilla))
    routed = run(case, replace(bounded, strategies=replace(vanilla, routing=True)))
    assert routed.throughput >= 0.98 * plain.throughput


def test_tail_batching_starts_no_more_than_it_trains_where_that_costs_time() -> None:
    """With 512 samples on 8 instances, Flexes' factor of 1.25 loses 3.3 %."""
    case = setting("qwen2.5-14b", "h20", 2, 64, 5_000)
    plain = run(case, System(name=SystemName.SYNC))
    fixed = run(case, System(name=SystemName.TAIL, fixed_over_launch=True))
    assert fixed.run_s > 1.01 * plain.run_s, "it does not lose here: choose another case"
    assert run(case, System(name=SystemName.TAIL)).run_s <= plain.run_s / 0.98


def test_tail_batching_starts_more_than_it_trains_where_that_gains() -> None:
    case = setting("qwen2.5-7b", "h800", 1, 16, 5_000)
    plain = run(case, System(name=SystemName.SYNC))
    assert plain.run_s > 1.1 * run(case, System(name=SystemName.TAIL)).run_s
