"""The number of instances that balances generation and training."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20, CostModel
from plexrl.rollout.policies.elastic import (
    MARGIN,
    InstanceBounds,
    InstanceChange,
    InstanceDecision,
    StageBalance,
    StageClock,
    StepTimes,
    StepWorkload,
    generation_s,
)
from tests.examples import examples

MOST = 12
# Generation time by the number of instances: a part is divided, a part is not.
LAWS = st.tuples(st.floats(1, 1000), st.floats(0.1, 100)).map(
    lambda parts: lambda count: parts[0] / count + parts[1]
)
TRAINING = st.floats(1, 500)
Law = Callable[[int], float]


def follow(
    balance: StageBalance,
    laws: list[tuple[Law, float]],
    instances: int,
    bounds: InstanceBounds,
    noise: Callable[[], float] = lambda: 1.0,
) -> list[int]:
    """The number of instances in each step, whose generation and training times are these; a
    change has effect in the next step."""
    counts = []
    for law, training in laws:
        counts.append(instances)
        times = StepTimes(generation_s=law(instances) * noise(), training_s=training * noise())
        decision = balance.decide(times, instances, bounds, law)
        if decision is not None and decision.change is not InstanceChange.NONE:
            instances += decision.change
            balance.restart()
    return counts


@given(
    st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)), min_size=10, max_size=120),
    st.integers(1, MOST),
    st.integers(1, MOST),
    st.integers(1, MOST),
)
def test_the_number_changes_by_one_and_moves_into_the_bounds(
    steps: list[tuple[float, float]], one: int, other: int, start: int
) -> None:
    bounds = InstanceBounds(least=min(one, other), most=max(one, other))
    balance, instances = StageBalance(), start
    for generation, training in steps:
        before = instances
        times = StepTimes(generation_s=generation, training_s=training)
        decision = balance.decide(times, instances, bounds, lambda count: 100 / count + 1)
        instances += 0 if decision is None else decision.change
        assert abs(instances - before) <= 1
        if bounds.least <= before <= bounds.most:
            assert bounds.least <= instances <= bounds.most
        else:
            assert abs(before - bounds.least) >= abs(instances - bounds.least) or (
                before > bounds.most and instances <= before
            )
        assert instances >= 1


@given(LAWS, TRAINING, st.integers(1, MOST), st.integers(0, 1 << 30))
def test_a_stationary_workload_with_some_noise_never_makes_it_oscillate(
    law: Law, training: float, start: int, seed: int
) -> None:
    chance = random.Random(seed)
    counts = follow(
        StageBalance(),
        [(law, training)] * 120,
        start,
        InstanceBounds(least=1, most=MOST),
        lambda: chance.uniform(0.98, 1.02),
    )
    changes = {later - before for before, later in pairwise(counts)} - {0}
    assert len(changes) <= 1, counts


@settings(max_examples=examples(25))
@given(LAWS, TRAINING, st.integers(1, MOST), st.integers(0, 1 << 30))
def test_with_much_noise_it_changes_ever_more_rarely(
    law: Law, training: float, start: int, seed: int
) -> None:
    chance = random.Random(seed)
    counts = follow(
        StageBalance(),
        [(law, training)] * 600,
        start,
        InstanceBounds(least=1, most=MOST),
        lambda: chance.uniform(0.5, 1.5),
    )
    changes = sum(before != later for before, later in pairwise(counts))
    # Of 600 steps. A law that hardly depends on the count makes each count as good as another.
    assert changes <= 90, counts


@given(LAWS, TRAINING, st.integers(1, MOST))
def test_it_reaches_the_balanced_number(law: Law, training: float, start: int) -> None:
    counts = follow(
        StageBalance(), [(law, training)] * 60, start, InstanceBounds(least=1, most=MOST)
    )
    # By search among all numbers: the largest with which generation is not the faster stage.
    balanced = max((n for n in range(1, MOST + 1) if law(n) >= training), default=1)
    if start <= balanced:
        assert counts[-1] == balanced
        return
    # One that is there already is removed only if that leaves the margin.
    assert balanced <= counts[-1] <= start
    enough = [n for n in range(1, MOST + 1) if law(n) * (1 + MARGIN) <= training]
    assert counts[-1] == min([start, *enough])


SEVEN_B = CostModel(k1=2e-8, k2=4e-3, k3=2e-5, k4=4e-3, k5=1.0)
"""About a 7B model on 8 GPUs."""


def lengths(most: int) -> list[int]:
    """A skewed spread of lengths up to the most."""
    return [max(1, int(most * (quantile / 200) ** 2)) for quantile in range(1, 201)]


def test_it_follows_lengths_that_grow_from_10_000_to_20_000_tokens() -> None:
    """StreamRL Fig. 11: lengths grow linearly over 20 steps; the trainer's GPUs stay the same."""
    balance, instances, bounds = StageBalance(), 2, InstanceBounds(least=1, most=8)
    kv_budget = 1.5e6

    def law_of(step: int) -> Law:
        work = StepWorkload(
            samples=1024, prompt_tokens=300, lengths=lengths(10_000 + 500 * min(step, 20))
        )
        return lambda count: generation_s(SEVEN_B, work, count, kv_budget)

    def training_of(step: int) -> float:
        """Balanced with two instances at first, then in proportion to the tokens."""
        return law_of(0)(2) * (10_000 + 500 * min(step, 20)) / 10_000

    laws = [(law_of(step), training_of(step)) for step in range(40)]
    counts = follow(balance, laws, instances, bounds)
    assert counts == sorted(counts), "instances were removed"
    assert counts[0] < counts[20], "nothing was added while lengths grew"
    law, training = laws[-1]
    reduction = law(counts[-1]) - law(counts[-1] + 1)
    assert law(counts[-1]) - training < reduction, "one more would still be of use"
    assert law(2) - training > law(2) - law(3), "two instances would have done"


def test_the_generation_is_the_slower_stage_so_one_is_added_with_what_it_is_to_bring() -> None:
    balance = StageBalance()
    found: list[InstanceDecision | None] = [
        balance.decide(
            StepTimes(generation_s=each, training_s=10.0),
            2,
            InstanceBounds(least=1, most=3),
            # Twice as fast as measured: only the ratio of two predictions counts.
            lambda count: 20.0 / count,
        )
        for each in (30.0, 18.0, 20.0)
    ]
    assert found[:2] == [None, None]
    assert found[2] == InstanceDecision(
        change=InstanceChange.ADD,
        generation_s=20.0,
        training_s=10.0,
        predicted_s=20.0 * (20 / 3) / 10,
    )


def simulated(model: CostModel, samples: list[int], prompt: float) -> float:
    """Step by step, all at once."""
    seconds = 0.0
    for step in range(max(samples)):
        running = sum(each > step for each in samples)
        seconds += model.step_s(model.k5 * running * (prompt + step + 0.5), running)
    return seconds


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 8), st.integers(0, 50))
def test_the_predicted_time_is_that_of_an_engine_with_room_for_all(
    recent: list[int], instances: int, prompt: int
) -> None:
    work = StepWorkload(samples=len(recent) * instances, prompt_tokens=prompt, lengths=recent)
    expected = simulated(QWEN3_30B_A3B_ON_H20, recent, prompt)
    found = generation_s(QWEN3_30B_A3B_ON_H20, work, instances, 1e9)
    assert found == pytest.approx(expected)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    st.integers(1, 100),
    st.integers(1, 11),
)
def test_more_instances_are_never_predicted_to_be_slower(
    recent: list[int], samples: int, instances: int
) -> None:
    work = StepWorkload(samples=samples, prompt_tokens=100, lengths=recent)
    times = [generation_s(SEVEN_B, work, count, 1e12) for count in (instances, instances + 1)]
    assert times[1] <= times[0] * (1 + 1e-9)


def test_bounds_without_an_instance_are_refused() -> None:
    for least, most in ((0, 3), (3, 2)):
        with pytest.raises(InvalidRequestError, match="give at least 1"):
            InstanceBounds(least=least, most=most)


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.booleans(), st.booleans()), min_size=1, max_size=40)
)
def test_the_clock_counts_the_busy_time_of_each_stage(
    spans: list[tuple[float, bool, bool]],
) -> None:
    clock, now = StageClock(), 100.0
    assert clock.begin_step(now) is None
    for seconds, generates, trains in spans:
        clock.note(now, generates=generates)
        clock.note(now, trains=trains)
        now += seconds
    times = clock.begin_step(now)
    assert times is not None
    assert times.generation_s == pytest.approx(sum(s for s, g, _ in spans if g))
    assert times.training_s == pytest.approx(sum(s for s, _, t in spans if t))
