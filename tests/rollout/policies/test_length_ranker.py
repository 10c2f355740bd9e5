"""The ranker of response lengths learns from prompts, and from earlier responses to them."""

import numpy as np
import pytest

from plexrl.rollout.policies.length_ranker import (
    EXAMPLES_MAX,
    PROMPTS_MIN,
    LengthExample,
    LengthRanker,
    Tokens,
    fit,
)


def prompts(count: int, seed: int, hard: int = 7) -> list[tuple[Tokens, int]]:
    """Random prompts, and how often the token `hard` is in each."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = rng.integers(10, 200, size=20).astype(np.int32)
        times = int(rng.integers(0, 6))
        prompt[rng.permutation(20)[:times]] = hard
        found.append((prompt, times))
    return found


def fitted(examples: list[LengthExample]) -> LengthRanker:
    found = fit(examples)
    assert found is not None
    return found


def rank_correlation(a: list[float], b: list[float]) -> float:
    first, second = (np.argsort(np.argsort(each)) for each in (a, b))
    return float(np.corrcoef(first, second)[0, 1])


def test_unseen_prompts_are_ranked_by_what_makes_responses_long() -> None:
    rng = np.random.default_rng(1)
    examples = [
        LengthExample(prompt, tuple(rng.lognormal(4 + 0.4 * times, 0.3, size=4).astype(int) + 1))
        for prompt, times in prompts(600, seed=2)
    ]
    ranker = fitted(examples)
    unseen = prompts(200, seed=3)
    expected = [float(ranker.expected_tokens(prompt)) for prompt, _ in unseen]
    assert rank_correlation(expected, [times for _, times in unseen]) > 0.8
    single = np.array([rng.normal(4 + 0.4 * times, 0.3) for _, times in unseen])
    left = single - np.log(expected)
    assert ranker.explained == pytest.approx(1 - float(left.var() / single.var()), abs=0.08)
    assert all(ranker.reliable_tokens(p) == ranker.expected_tokens(p) for p, _ in unseen)


def test_prompts_that_say_nothing_are_not_explained() -> None:
    rng = np.random.default_rng(4)
    examples = [
        LengthExample(prompt, (int(rng.lognormal(5, 0.5)) + 1,))
        for prompt, _ in prompts(400, seed=5)
    ]
    ranker = fitted(examples)
    assert abs(ranker.explained) < 0.1
    assert not any(ranker.reliable_tokens(prompt) for prompt, _ in prompts(100, seed=6))
    expected = [ranker.expected_tokens(prompt) for prompt, _ in prompts(100, seed=6)]
    assert max(expected) < 1.5 * min(expected)


def test_the_history_of_a_prompt_is_believed_as_far_as_its_responses_agree() -> None:
    rng = np.random.default_rng(7)
    known = prompts(200, seed=8, hard=9)
    # Nothing in the prompt says how long its responses are: only earlier ones do.
    own = rng.normal(5, 1, size=200)
    correlations = []
    for spread in (0.1, 3.0):
        examples = [
            LengthExample(prompt, tuple(np.exp(rng.normal(mean, spread, size=2)).astype(int) + 1))
            for (prompt, _), mean in zip(known, own, strict=True)
        ]
        ranker = fitted(examples)
        expected = [float(ranker.expected_tokens(prompt)) for prompt, _ in known]
        correlations.append(rank_correlation(expected, list(own)))
        spread_of_expected = float(np.std(np.log(expected)))
        assert spread_of_expected < 1.3, "noise of single responses is not a property of prompts"
        is_used = {bool(ranker.reliable_tokens(prompt)) for prompt, _ in known}
        assert is_used == {spread < 1}, "only where responses to a prompt agree"
        assert not ranker.reliable_tokens(prompts(1, seed=99)[0][0])
    assert correlations[0] > 0.95
    assert correlations[1] < correlations[0]


def test_lengths_that_grow_with_training_do_not_hide_the_ranks() -> None:
    rng = np.random.default_rng(9)
    examples = [
        LengthExample(prompt, (int(rng.lognormal(3 + at / 400 + 0.4 * times, 0.2)) + 1,))
        for at, (prompt, times) in enumerate(prompts(1200, seed=10))
    ]
    ranker = fitted(examples)
    unseen = prompts(200, seed=11)
    expected = [float(ranker.expected_tokens(prompt)) for prompt, _ in unseen]
    assert rank_correlation(expected, [times for _, times in unseen]) > 0.8
    middle = np.exp(3 + 1200 / 400 + 0.4 * 2.5)
    assert float(np.median(expected)) == pytest.approx(middle, rel=0.5)


def test_the_same_examples_give_the_same_ranker() -> None:
    examples = [LengthExample(p, (10 + t, 12 + t)) for p, t in prompts(64, seed=12)]
    first, second = fitted(examples), fitted(list(examples))
    for prompt, _ in prompts(20, seed=13) + prompts(64, seed=12):
        assert first.expected_tokens(prompt) == second.expected_tokens(prompt)


def test_old_examples_are_forgotten() -> None:
    new = [LengthExample(p, (10 + t,)) for p, t in prompts(EXAMPLES_MAX, seed=14)]
    old = [LengthExample(p, (9000,)) for p, _ in prompts(100, seed=15)]
    with_old, without = fitted(old + new), fitted(new)
    for prompt, _ in prompts(20, seed=16):
        assert with_old.expected_tokens(prompt) == without.expected_tokens(prompt)


def test_few_prompts_are_no_ranker() -> None:
    few = [LengthExample(p, (10,)) for p, _ in prompts(PROMPTS_MIN - 1, seed=17)]
    assert fit(few * 10) is None
    assert fit([]) is None


@pytest.mark.parametrize("size", [1, 2, 5000])
def test_prompts_of_any_size_and_equal_lengths_are_taken(size: int) -> None:
    examples = [
        LengthExample(np.full(size, each, dtype=np.int32), (50,)) for each in range(PROMPTS_MIN)
    ]
    ranker = fitted(examples)
    assert ranker.expected_tokens(np.zeros(size + 1, dtype=np.int32)) == pytest.approx(50, abs=1)


def test_a_known_prompt_is_expected_to_be_as_long_as_it_was_in_later_epochs_too() -> None:
    known = prompts(128, seed=21)
    # Four epochs: more than one period of examples.
    examples = [LengthExample(prompt, (90, 110)) for prompt, _ in known * 4]
    ranker = fitted(examples)
    for prompt, _ in known:
        assert ranker.expected_tokens(prompt) == pytest.approx(100, rel=0.1)


def test_many_responses_to_a_prompt_are_believed_more_than_one() -> None:
    rng = np.random.default_rng(22)
    known = [prompt for prompt, _ in prompts(120, seed=23, hard=9)]
    examples = [
        LengthExample(prompt, tuple(np.exp(rng.normal(mean, 1.0, size=3)).astype(int) + 1))
        for prompt, mean in zip(known[:-2], rng.normal(5, 1, size=118), strict=True)
    ]
    often, once = known[-2:]
    examples += [LengthExample(often, (3000,) * 16), LengthExample(once, (3000,))]
    ranker = fitted(examples)
    assert ranker.expected_tokens(often) > 1.5 * ranker.expected_tokens(once)
