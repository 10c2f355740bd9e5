"""Advantages and returns of a critic's values, against the definition written out as a sum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl import losses
from plexrl.errors import InvalidRequestError
from tests.examples import examples


def by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float, last: float
) -> list[float]:
    """Σ_k (gamma · lam)^k δ_(t+k) of each action (Schulman et al. 2016, equation 16)."""
    after = [*values, last][1:]
    deltas = [r + gamma * new - old for r, new, old in zip(rewards, after, values, strict=True)]
    count = len(deltas)
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, count))
        for t in range(count)
    ]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 10_000),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    is_cut=st.booleans(),
)
@settings(max_examples=examples(80), deadline=None)
def test_advantages_are_their_sums_over_the_tokens_that_are_actions(
    lengths: list[int], seed: int, gamma: float, lam: float, is_cut: bool
) -> None:
    rng = np.random.default_rng(seed)
    mask = [(rng.random(length) < 0.6).astype(np.float32) for length in lengths]
    rewards = [rng.normal(size=len(row)) * row for row in mask]
    values = [rng.normal(size=length).astype(np.float32) for length in lengths]
    last = rng.normal(size=len(lengths)).tolist() if is_cut else None
    advantages, returns = losses.gae(rewards, values, mask, gamma=gamma, lam=lam, last_values=last)
    for row, length in enumerate(lengths):
        acts = np.flatnonzero(mask[row])
        wanted = np.zeros(length)
        wanted[acts] = by_definition(
            rewards[row][acts].tolist(),
            values[row][acts].tolist(),
            gamma,
            lam,
            0.0 if last is None else last[row],
        )
        assert advantages[row].dtype == returns[row].dtype == np.float32
        assert np.allclose(advantages[row], wanted, atol=1e-5)
        assert np.allclose(returns[row], np.where(mask[row], wanted + values[row], 0), atol=1e-5)


def test_without_a_decay_the_return_is_the_sum_of_rewards_to_come() -> None:
    advantages, returns = losses.gae(
        [[0.0, 0.0, 1.0, 2.0]], [[9.0, 0.5, 0.25, 1.0]], [[0, 1, 1, 1]], gamma=1.0, lam=1.0
    )
    assert returns[0].tolist() == [0.0, 3.0, 3.0, 2.0]
    assert advantages[0].tolist() == [0.0, 2.5, 2.75, 1.0]


def test_rows_of_no_batch_and_rewards_of_no_action_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="one number for each of its tokens"):
        losses.gae([[1.0]], [[1.0, 2.0]], [[1.0]])
    with pytest.raises(InvalidRequestError, match=r"1 rows of rewards.*2 last values"):
        losses.gae([[1.0]], [[1.0]], [[1.0]], last_values=[0.0, 0.0])
    with pytest.raises(InvalidRequestError, match="token 1 of row 0 has reward 3 and mask 0"):
        losses.gae([[0.0, 3.0]], [[0.0, 0.0]], [[1, 0]])
    with pytest.raises(InvalidRequestError, match=r"gamma is 1\.5"):
        losses.gae([[0.0]], [[0.0]], [[1]], gamma=1.5)
    assert losses.gae([], [], []) == ([], [])
