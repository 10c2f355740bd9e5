"""The division of instances between long samples and the others, against an engine step by step."""

import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.length_dispatch import (
    SAMPLES_MAX,
    DispatchedBatch,
    LengthSpread,
    choose_division,
    generation_s,
    latency_s,
    thin,
)
from plexrl.rollout.trajectories.lengths import RankedLength

MODELS = st.builds(
    CostModel,
    k1=st.floats(0, 1e-6),
    k2=st.floats(1e-4, 1e-2),
    k3=st.floats(0, 1e-3),
    k4=st.floats(0, 1e-2),
    k5=st.just(1.0),
)


def generated_in_rounds(
    model: CostModel, samples: int, prompt_tokens: int, length: int, kv_budget: float
) -> float:
    """Seconds in which an engine generates equal samples, admitting as many as fit when they end,
    until no sample is left; each step has the mean load of a round."""
    seconds, left = 0.0, samples
    most = max(1, math.floor(kv_budget / (prompt_tokens + length)))
    batch = min(most, samples)
    while left > 0:
        load = batch * (prompt_tokens + length / 2)
        seconds += length * (model.k1 * load + max(model.k2, model.k3 * batch) + model.k4)
        left -= batch
    return seconds


@given(
    MODELS, st.integers(1, 300), st.integers(1, 500), st.integers(1, 5000), st.integers(1, 10**6)
)
def test_latency_is_that_of_rounds_that_fit_the_cache(
    model: CostModel, samples: int, prompt_tokens: int, length: int, kv_budget: int
) -> None:
    expected = generated_in_rounds(model, samples, prompt_tokens, length, kv_budget)
    found = latency_s(model, samples, prompt_tokens, length, kv_budget)
    assert found == pytest.approx(expected)


def plainly_drained(
    model: CostModel, lengths: Sequence[int], prompt_tokens: float, kv_budget: float
) -> float:
    """Seconds of one instance, step by step."""
    waiting, running, seconds = list(lengths), list[tuple[int, int]](), 0.0
    while waiting or running:
        while waiting and (
            not running
            or sum(prompt_tokens + whole for whole, _ in running) + prompt_tokens + waiting[0]
            <= kv_budget
        ):
            running.append((waiting.pop(0), 0))
        kv = sum(prompt_tokens + done for _, done in running)
        seconds += model.step_s(kv, len(running))
        running = [(whole, done + 1) for whole, done in running if done + 1 < whole]
    return seconds


@given(
    MODELS,
    st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=2), min_size=5, max_size=15),
    st.integers(2, 5),
    st.integers(0, 4),
    st.integers(50, 400),
)
def test_the_time_of_a_batch_is_that_of_its_steps(
    model: CostModel, lengths: list[list[int]], instances: int, long: int, kv: int
) -> None:
    long = min(long, instances - 1)
    batch = DispatchedBatch(
        expected=[9] * len(lengths),
        samples=2,
        prompt_tokens=3,
        instances=instances,
        kv_budget=kv,
    )
    first = len(lengths) // 5
    sides = [(lengths[:first], long), (lengths[first:], instances - long)]
    if not long:
        sides = [(lengths, instances)]
    ends = []
    for prompts, count in sides:
        samples = [tokens for prompt in prompts for tokens in prompt]
        ends += [plainly_drained(model, samples[at::count], 3, kv) for at in range(count)]
    assert generation_s(model, batch, lengths, long) == pytest.approx(max(ends))


def ranked(expected: Sequence[int], noise: float, seed: int) -> list[RankedLength]:
    random = Random(seed)
    return [RankedLength(e, max(1, round(e * random.lognormvariate(0, noise)))) for e in expected]


SLOW_IN_BATCHES = CostModel(k1=0, k2=1e-4, k3=1e-3, k4=0, k5=1)
SKEWED = DispatchedBatch(
    expected=[4000] * 8 + [100] * 32, samples=1, prompt_tokens=1, instances=16, kv_budget=1e9
)


def test_long_samples_are_apart_if_that_is_sooner() -> None:
    """A step is as long as its batch is large: short samples beside long ones slow them down."""
    past = ranked([100] * 160 + [4000] * 40, 0.0, 1)
    found = choose_division(SLOW_IN_BATCHES, SKEWED, past)
    assert 1 <= found < SKEWED.instances
    lengths = [[tokens] for tokens in SKEWED.expected]
    undivided = generation_s(SLOW_IN_BATCHES, SKEWED, lengths, 0)
    assert generation_s(SLOW_IN_BATCHES, SKEWED, lengths, found) < undivided


def test_ranks_that_miss_divide_nothing() -> None:
    """Of those that are expected to be short as many are long as of the others."""
    past = [RankedLength(e, tokens) for e in (100, 4000) for tokens in (100, 100, 100, 4000)] * 20
    assert choose_division(SLOW_IN_BATCHES, SKEWED, past) == 0


@given(
    MODELS,
    st.lists(st.integers(0, 3000), min_size=5, max_size=40),
    st.integers(1, 3),
    st.integers(2, 8),
    st.floats(0, 2),
    st.integers(0, 1 << 30),
)
def test_a_division_is_chosen_only_if_it_is_expected_to_gain(
    model: CostModel,
    expected: list[int],
    samples: int,
    instances: int,
    noise: float,
    seed: int,
) -> None:
    """With equal past responses there are no misses, and the choice is by the expected lengths."""
    batch = DispatchedBatch(
        expected=sorted(expected, reverse=True),
        samples=samples,
        prompt_tokens=10,
        instances=instances,
        kv_budget=1e6,
    )
    past = ranked([max(1, each) for each in expected] * 40, noise, seed)
    found = choose_division(model, batch, past)
    assert found == choose_division(model, batch, list(reversed(past)))
    assert 0 <= found < instances
    if found and not noise and all(expected):
        lengths = [[tokens] * samples for tokens in batch.expected]
        divided, undivided = (generation_s(model, batch, lengths, n) for n in (found, 0))
        assert divided <= undivided


@pytest.mark.parametrize(
    ("change", "count"),
    [({"instances": 1}, 200), ({"expected": [0] * 40}, 200), ({"expected": [9] * 4}, 200), ({}, 9)],
)
def test_nothing_is_divided_without_sides_or_knowledge(
    change: dict[str, object], count: int
) -> None:
    past = ranked([100] * count, 0.0, 1)
    batch = replace(SKEWED, **change)  # type: ignore[arg-type]
    assert choose_division(SLOW_IN_BATCHES, batch, past) == 0


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_a_spread_is_of_the_longest_fifth_and_the_others(lengths: list[int]) -> None:
    spread = LengthSpread.means(lengths)
    count = max(1, len(lengths) // 5)
    longest = sorted(lengths)[-count:]
    assert spread.long == pytest.approx(sum(longest) / count)
    total = spread.long * count + spread.regular * (len(lengths) - count)
    assert len(lengths) == 1 or total == pytest.approx(sum(lengths))
    assert spread.regular <= spread.long
    quantiles = LengthSpread.quantiles(lengths)
    assert {quantiles.long, quantiles.regular} <= set(lengths)
    assert quantiles.regular <= quantiles.long


@given(MODELS, st.integers(1, 20_000), st.integers(1, 3000), st.integers(0, 1 << 30))
def test_what_is_simulated_of_a_batch_is_bounded(
    model: CostModel, prompts: int, samples: int, seed: int
) -> None:
    random = Random(seed)
    batch = DispatchedBatch(
        expected=sorted((random.randint(0, 5000) for _ in range(prompts)), reverse=True),
        samples=samples,
        prompt_tokens=10,
        instances=8,
        kv_budget=1e6,
    )
    thinned, _ = thin(batch, model)
    assert len(thinned.expected) * thinned.samples <= SAMPLES_MAX
    assert list(thinned.expected) == sorted(thinned.expected, reverse=True)
    assert set(thinned.expected) <= set(batch.expected)
    assert thin(thinned, model) == (thinned, model)


@pytest.mark.parametrize(("prompts", "samples"), [(512, 16), (16, 512), (8192, 1)])
@pytest.mark.parametrize("long", [0, 3])
@pytest.mark.parametrize("kv", [1e9, 4e5])
def test_a_thinned_batch_takes_about_as_long(
    prompts: int, samples: int, long: int, kv: float
) -> None:
    """Also where the cache has room for a part of it only."""
    model = CostModel(k1=1e-8, k2=5e-3, k3=1e-4, k4=1e-3, k5=1.0)
    random = Random(5)
    expected = sorted((round(random.lognormvariate(6, 1)) for _ in range(prompts)), reverse=True)
    batch = DispatchedBatch(
        expected=expected, samples=samples, prompt_tokens=100, instances=8, kv_budget=kv
    )
    thinned, scaled = thin(batch, model)
    assert len(thinned.expected) * thinned.samples < prompts * samples
    found, wanted = (
        generation_s(each, of, [[max(1, n)] * of.samples for n in of.expected], long)
        for each, of in ((scaled, thinned), (model, batch))
    )
    assert found == pytest.approx(wanted, rel=0.15)
