"""The division of instances between long samples and the others, against a simulated engine."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.length_dispatch import LengthSpread, divide, latency_s

MODELS = st.builds(
    CostModel,
    k1=st.floats(0, 1e-6),
    k2=st.floats(1e-4, 1e-2),
    k3=st.floats(0, 1e-3),
    k4=st.floats(0, 1e-2),
    k5=st.just(1.0),
)
SPREADS = st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)).map(
    lambda pair: LengthSpread(regular=float(min(pair)), long=float(max(pair)))
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


@given(
    MODELS,
    st.integers(1, 60),
    st.integers(1, 300),
    SPREADS,
    st.integers(2, 12),
    st.integers(1, 10**6),
)
def test_no_division_ends_earlier(
    model: CostModel, long: int, regular: int, spread: LengthSpread, instances: int, kv: int
) -> None:
    found = divide(
        model,
        long=long,
        regular=regular,
        prompt_tokens=100,
        spread=spread,
        instances=instances,
        kv_budget=kv,
    )
    assert found is not None
    assert found.long >= 1
    assert found.regular >= 1
    assert found.long + found.regular == instances
    for other in range(1, instances):
        # The fullest instance of each side has its share, rounded up.
        ends = max(
            generated_in_rounds(model, math.ceil(long / other), 100, int(spread.long), kv),
            generated_in_rounds(
                model, math.ceil(regular / (instances - other)), 100, int(spread.regular), kv
            ),
        )
        assert found.generation_s <= ends * (1 + 1e-9)


@pytest.mark.parametrize(("long", "regular", "instances"), [(0, 8, 4), (8, 0, 4), (2, 8, 1)])
def test_nothing_is_divided_when_a_side_would_be_empty(
    long: int, regular: int, instances: int
) -> None:
    model = CostModel(k1=0, k2=1e-3, k3=1e-4, k4=0, k5=1)
    spread = LengthSpread(regular=10, long=20)
    assert (
        divide(
            model,
            long=long,
            regular=regular,
            prompt_tokens=1,
            spread=spread,
            instances=instances,
            kv_budget=1000,
        )
        is None
    )


def test_longer_long_samples_get_more_instances() -> None:
    model = CostModel(k1=0, k2=1e-4, k3=1e-3, k4=0, k5=1)
    counts = []
    for long in (100, 200, 400, 1600):
        found = divide(
            model,
            long=32,
            regular=128,
            prompt_tokens=1,
            spread=LengthSpread(regular=100, long=long),
            instances=16,
            kv_budget=1e9,
        )
        assert found is not None
        counts.append(found.long)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_a_spread_is_of_the_longest_fifth_and_the_others(lengths: list[int]) -> None:
    spread = LengthSpread.of(lengths)
    count = max(1, len(lengths) // 5)
    longest = sorted(lengths)[-count:]
    assert spread.long == pytest.approx(sum(longest) / count)
    total = spread.long * count + spread.regular * (len(lengths) - count)
    assert len(lengths) == 1 or total == pytest.approx(sum(lengths))
    assert spread.regular <= spread.long


def test_no_lengths_have_no_spread() -> None:
    with pytest.raises(InvalidRequestError, match="generate"):
        LengthSpread.of([])
