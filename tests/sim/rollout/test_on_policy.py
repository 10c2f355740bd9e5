"""Flexes on the virtual clock: every prompt once, against a calculation of its own, parts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.latency.costs import EngineCosts
from plexrl.latency.gpus import Gpu
from plexrl.latency.models import MODELS, QWEN25_14B
from plexrl.sim.rollout.engine.rewards import AT_ONCE, MIXED, RewardCosts, Rewards
from plexrl.sim.rollout.results.outcome import RolloutOutcome, outcome
from plexrl.sim.rollout.results.recorder import Recorder
from plexrl.sim.rollout.runs.run import simulate_rollout
from plexrl.sim.rollout.setting import TAIL_ONLY, Parts, Setting, System, SystemName
from plexrl.sim.rollout.systems.flexes.streaming import StreamTrainer
from plexrl.sim.rollout.workload import Prompts, RolloutWorkload
from tests.examples import examples

SLOW = RewardCosts(usual_s=2.0, slow_s=30.0, slow_part=0.3)
SMALL_GPU = Gpu(name="small", flops=1e14, bandwidth=1e12, memory=38e9, link=1e11)
SMALL_MODEL = replace(QWEN25_14B, gpu=SMALL_GPU)
"""Its KV cache on one GPU has room for 23 000 tokens."""
SMALL = Setting(
    gpus=8,
    batch_groups=6,
    steps=4,
    warmup_steps=0,
    workload=RolloutWorkload(limit=10_000, group_size=4),
    costs=SMALL_MODEL.costs(1),
    model=SMALL_MODEL,
    rewards=SLOW,
    cycle_s=5.0,
)
PARTS = [
    Parts(tail=tail, rewards=rewards, parallelism=parallelism, stream=stream)
    for tail in (False, True)
    for rewards in (False, True)
    for parallelism in (False, True)
    for stream in ((False, True) if rewards else (False,))
]
NO_PLANNER = Parts(parallelism=False)
TAIL = System(name=SystemName.TAIL, fixed_over_launch=True)
SYNC = System(name=SystemName.SYNC)


def flexes(parts: Parts, factor: float = 1.25) -> System:
    return System(
        name=SystemName.FLEXES,
        parts=parts,
        over_launch_prompts=factor,
        over_launch_responses=factor,
        fixed_over_launch=True,
    )


def figures(setting: Setting, system: System) -> RolloutOutcome:
    return outcome(setting, system, simulate_rollout(setting, system))


def trained(recorder: Recorder) -> list[Counter[int]]:
    """The responses of each prompt, by training step."""
    steps: list[Counter[int]] = [Counter() for _ in recorder.steps]
    for lane in recorder.lanes:
        steps[lane.buffer][lane.group] += 1
    return steps


def check_batches(setting: Setting, recorder: Recorder) -> None:
    """Each step trains its number of prompts with all responses, and each prompt is trained
    once."""
    steps = trained(recorder)
    size = setting.workload.group_size
    assert [set(step.values()) for step in steps] == [{size}] * setting.steps
    assert [len(step) for step in steps] == [setting.batch_groups] * setting.steps
    prompts = sorted(group for step in steps for group in step)
    assert prompts == list(range(setting.steps * setting.batch_groups))
    assert all(set(step.staleness) == {0} for step in recorder.steps)


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: parts.label)
def test_every_prompt_is_trained_once_whatever_is_on(parts: Parts) -> None:
    recorder = simulate_rollout(SMALL, flexes(parts), with_history=True)
    check_batches(SMALL, recorder)
    kinds = {step.round_kind for step in recorder.steps}
    assert kinds == ({"short", "long"} if parts.tail else {""})


@settings(max_examples=examples(25))
@given(
    batch=st.integers(1, 7),
    group=st.integers(1, 4),
    factor=st.floats(1.0, 3.0),
    slow=st.floats(0.0, 1.0),
    command_s=st.sampled_from([0.0, 0.05, 4.0, 20.0]),
    parts=st.sampled_from(PARTS),
    seed=st.integers(0, 100),
)
@example(batch=1, group=3, factor=2.0, slow=0.0, command_s=4.0, parts=NO_PLANNER, seed=0)
@example(batch=5, group=2, factor=1.5, slow=0.0, command_s=4.0, parts=TAIL_ONLY, seed=50)
def test_every_prompt_is_trained_once_in_any_setting(
    batch: int, group: int, factor: float, slow: float, command_s: float, parts: Parts, seed: int
) -> None:
    setting = replace(
        SMALL,
        batch_groups=batch,
        command_s=command_s,
        rewards=replace(SLOW, slow_part=slow),
        workload=replace(SMALL.workload, group_size=group, seed=seed),
    )
    check_batches(setting, simulate_rollout(setting, flexes(parts, factor), with_history=True))


TOKEN_S = EngineCosts(
    k1=0.0,
    k2=0.0,
    k3=0.0,
    k4=1.0,
    kv_tokens=10_000_000,
    prefill_s_per_token=0.0,
    prefill_s_per_token2=0.0,
    pull_s=3.0,
    train_gpu_s_per_token=0.0,
    train_fixed_s=11.0,
)
"""Every token takes a second, however many are generated beside it."""


def by_hand(setting: Setting, factor: float, *, has_stage: bool) -> tuple[float, list[str]]:
    """Seconds of a run in which each response takes as many seconds as it has tokens, and the kinds
    of its rounds: from sorted lists, round by round. `has_stage`: rewards begin when all responses
    of a batch are complete."""
    size, batch = setting.workload.group_size, setting.batch_groups
    extra = ceil(round(factor * size, 6)) - size
    starts = ceil(round(factor * batch, 6))
    drawn = Prompts(setting.workload)
    grading = Rewards(setting.rewards, setting.workload.seed)
    fresh = list(range(setting.steps * batch))
    queue: list[int] = []
    total_s, kinds = 0.0, []

    def ready_s(prompt: int, samples: int) -> float:
        ends = sorted(each.response_tokens for each in drawn.group(prompt, extra)[:samples])
        return ends[size - 1] + (0.0 if has_stage else grading.seconds(prompt))

    while fresh or queue:
        if len(queue) >= batch:
            kinds.append("long")
            samples = dict.fromkeys(queue[:batch], size)
        else:
            kinds.append("short")
            samples = dict.fromkeys(fresh[:starts], size + extra)
            samples |= dict.fromkeys(queue[: max(0, batch - len(samples))], size)
        fresh = [each for each in fresh if each not in samples]
        queue = [each for each in queue if each not in samples]
        times = {each: ready_s(each, count) for each, count in samples.items()}
        ordered = sorted(times, key=lambda each: times[each])
        total_s += times[ordered[batch - 1]]
        if has_stage:
            total_s += max(grading.seconds(each) for each in ordered[:batch])
        queue += sorted(ordered[batch:])
        total_s += setting.costs.train_fixed_s + setting.costs.pull_s
    return total_s - setting.costs.pull_s, kinds


@settings(max_examples=examples(40))
@given(
    batch=st.integers(1, 6),
    group=st.integers(1, 4),
    factor=st.sampled_from([1.0, 1.25, 1.5, 2.0]),
    has_stage=st.booleans(),
    rewards=st.sampled_from([AT_ONCE, SLOW]),
    seed=st.integers(0, 1000),
)
def test_rounds_take_as_long_as_a_calculation_by_hand_says(
    batch: int, group: int, factor: float, has_stage: bool, rewards: RewardCosts, seed: int
) -> None:
    setting = Setting(
        gpus=4,
        batch_groups=batch,
        steps=9,
        warmup_steps=0,
        workload=RolloutWorkload(limit=30_000, group_size=group, seed=seed),
        costs=TOKEN_S,
        rewards=rewards,
        command_s=0.0,
        cycle_s=1000.0,
    )
    parts = Parts(rewards=not has_stage, parallelism=False, stream=False)
    recorder = simulate_rollout(setting, flexes(parts, factor))
    wanted_s, kinds = by_hand(setting, factor, has_stage=has_stage)
    assert recorder.end_s == pytest.approx(wanted_s)
    if factor > 1.0:
        assert [step.round_kind for step in recorder.steps] == kinds


def test_without_its_parts_it_is_the_synchronous_system() -> None:
    """Except for how the coordinator distributes responses, which does not matter here."""
    setting = replace(SMALL, costs=TOKEN_S, command_s=0.0, cycle_s=1000.0)
    none = Parts(tail=False, rewards=False, parallelism=False, stream=False)
    plain, sync = figures(setting, flexes(none)), figures(setting, SYNC)
    assert plain.run_s == pytest.approx(sync.run_s)
    assert plain.reward_s == sync.reward_s > 2.0


def test_tail_is_flexes_with_nothing_else() -> None:
    tail = Parts(rewards=False, parallelism=False, stream=False)
    alone, same = figures(SMALL, TAIL), figures(SMALL, flexes(tail))
    assert replace(alone, decision_ms=None, system=same.system) == replace(same, decision_ms=None)


def test_the_time_of_a_run_is_rollout_rewards_and_training() -> None:
    for system in (SYNC, TAIL, flexes(Parts())):
        recorder = simulate_rollout(SMALL, system)
        found = outcome(SMALL, system, recorder)
        train_s = sum(step.end_s - step.start_s for step in recorder.steps)
        waits_s = SMALL.steps * (found.rollout_s + found.reward_s)
        assert found.run_s == pytest.approx(train_s + waits_s)
        assert (found.reward_s > 0) == (system != flexes(Parts()))


def test_only_speculation_generates_what_is_not_trained() -> None:
    assert figures(SMALL, SYNC).untrained == 0.0
    assert figures(SMALL, flexes(Parts(tail=False))).untrained == 0.0
    assert 0.0 < figures(SMALL, TAIL).untrained < 0.6


def test_training_early_shortens_the_training_step_by_what_it_trains() -> None:
    """One long response keeps the round open until all others are trained."""
    lengths = RolloutWorkload(limit=20_000, group_size=1, correlation=0.0, seed=3)
    costs = replace(TOKEN_S, train_gpu_s_per_token=1e-4, pull_s=0.0)
    setting = replace(SMALL, workload=lengths, costs=costs, rewards=AT_ONCE, steps=1)
    setting = replace(setting, cycle_s=1000.0)
    parts = Parts(tail=False, parallelism=False, stream=False)
    (late,) = simulate_rollout(setting, flexes(parts)).steps
    (early,) = simulate_rollout(setting, flexes(replace(parts, stream=True))).steps
    longest = max(group[0].response_tokens for group in map(Prompts(lengths).group, range(6)))
    assert early.start_s == pytest.approx(late.start_s, abs=1.0)
    assert late.end_s - late.start_s == pytest.approx(costs.train_s(late.tokens, 8))
    left = costs.train_s(longest + lengths.prompt_tokens, 8)
    assert early.end_s - early.start_s == pytest.approx(left)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 400)), max_size=12),
    st.integers(0, 50),
    st.integers(0, 8),
    st.integers(0, 60),
)
def test_early_training_is_that_of_a_count_by_seconds(
    prompts: Sequence[tuple[int, int]], free_s: int, gpus: int, end_s: int
) -> None:
    """A GPU trains ten tokens a second; one second after another is counted."""
    trainer = StreamTrainer(0.1)
    events = [(at, 1, tokens) for at, tokens in prompts if at <= end_s]
    if free_s <= end_s:
        events.append((free_s, 0, gpus))
    for at, kind, count in sorted(events):
        if kind:
            trainer.complete(count, float(at))
        else:
            trainer.free(count, float(at))
    waiting = done = 0
    for second in range(end_s):
        waiting += sum(tokens for at, tokens in prompts if at == second)
        now = min(waiting, 10 * gpus) if second >= free_s else 0
        waiting, done = waiting - now, done + now
    assert trainer.end(float(end_s)) == pytest.approx(done)
    assert trainer.end(float(end_s) + 1.0) == 0.0


def test_the_planner_doubles_the_size_when_engines_preempt_more() -> None:
    workload = RolloutWorkload(limit=20_000, group_size=8)
    setting = replace(SMALL, workload=workload, batch_groups=8, steps=10)
    system = flexes(Parts(rewards=False, stream=False))
    planned = simulate_rollout(setting, system)
    fixed = simulate_rollout(setting, TAIL)
    assert planned.rollout_gpus == fixed.rollout_gpus == 8
    assert planned.preemptions < fixed.preemptions
    assert fixed.instances == 8


def test_other_systems_refuse_rewards_that_take_time() -> None:
    with pytest.raises(InvalidRequestError, match="staleflow knows no rewards"):
        simulate_rollout(SMALL, System(name=SystemName.STALEFLOW, rollout_gpus=5))


def test_the_planner_needs_a_model() -> None:
    with pytest.raises(InvalidRequestError, match="give a model"):
        simulate_rollout(replace(SMALL, model=None), flexes(Parts()))


def test_streaming_needs_rewards() -> None:
    with pytest.raises(InvalidRequestError, match="switch rewards on"):
        Parts(rewards=False)


@pytest.mark.parametrize("factor", [0.9, 17.0, float("nan")])
def test_an_impossible_over_launch_is_refused(factor: float) -> None:
    with pytest.raises(InvalidRequestError, match="over_launch_prompts"):
        System(name=SystemName.TAIL, over_launch_prompts=factor)


def test_slow_rewards_have_their_part_of_the_prompts() -> None:
    rewards = Rewards(MIXED, seed=0)
    slow = sum(rewards.seconds(prompt) == 30.0 for prompt in range(6000))
    assert slow / 6000 == pytest.approx(1 / 60, rel=0.2)
    assert rewards.stage_s([]) == 0.0


@pytest.mark.parametrize("name", sorted(name for name in MODELS if MODELS[name].kv_tokens(1) > 0))
def test_two_gpus_have_twice_the_speed_and_more_than_twice_the_cache(name: str) -> None:
    one, two, model = MODELS[name].costs(1), MODELS[name].costs(2), MODELS[name]
    assert two.kv_tokens > 2 * one.kv_tokens
    assert (two.k1, two.k2) == pytest.approx((one.k1 / 2, one.k2 / 2))
    assert two.k3 > one.k3 / 2
    assert two.k4 > one.k4
    assert two.train_gpu_s_per_token == one.train_gpu_s_per_token
    assert model.sizes(two.kv_tokens) == [4, 8]


def test_a_model_that_does_not_fit_is_refused() -> None:
    small = replace(MODELS["qwen2.5-32b"], gpu=SMALL_GPU)
    with pytest.raises(InvalidRequestError, match="66 GB of weights"):
        small.costs(1)
    with pytest.raises(InvalidRequestError, match="give 1 to 8"):
        small.costs(16)
