"""A sick run is named, and a well one is not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.router.observe.run_figures import end_tokens, generated, stepped, trained
from plexrl.router.observe.run_health import (
    THRESHOLDS,
    WINDOW,
    GeneratedSamples,
    GivenRewards,
    Observation,
    RunHealth,
    Stepped,
    Trained,
    check_limits,
    merge_views,
    of_critic,
)


def drawn(**fields: int) -> GeneratedSamples:
    known = {"samples": 32, "by_length": 0, "past_end": 0, "old_cache": 0, "trainer_step": 0}
    return GeneratedSamples(**{**known, **fields})


def taught(
    *,
    loss: float = 0.5,
    kl: float = 0.0,
    clip_fraction: float = 0.0,
    rows: int = 32,
    flat_rows: int = 0,
    sampled_step: int | None = None,
) -> Trained:
    return Trained(
        loss=loss,
        tokens=100.0,
        rows=rows,
        flat_rows=flat_rows,
        kl=kl,
        clip_fraction=clip_fraction,
        sampled_step=sampled_step,
    )


def codes(*seen: Observation) -> list[str]:
    health = RunHealth()
    for each in seen:
        health.observe(each)
        health.check_invariants()
    return [warning["code"] for warning in health.view()["warnings"]]


def test_a_well_run_has_no_warning() -> None:
    assert codes(drawn(by_length=8), taught(), Stepped(grad_norm=1.0, trainer_step=1)) == []


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("ended_by_length", [drawn(by_length=17)]),
        ("past_end_token", [drawn(past_end=2)]),
        ("old_cache", [drawn(old_cache=7)]),
        ("equal_rewards", [taught(flat_rows=26)]),
        ("clipped", [taught(clip_fraction=0.31)]),
        ("failed_rewards", [GivenRewards(total=32, failed=4)]),
        ("not_finite", [taught(loss=math.nan)]),
        ("not_finite", [Stepped(grad_norm=math.inf, trainer_step=None)]),
        (
            "kl_same_weights",
            [drawn(trainer_step=2), Stepped(grad_norm=1.0, trainer_step=2), taught(kl=0.02)],
        ),
        (
            "kl_older_weights",
            [drawn(), Stepped(grad_norm=1.0, trainer_step=2), taught(kl=0.2)],
        ),
    ],
)
def test_each_sign_of_a_sick_run_is_named(code: str, seen: list[Observation]) -> None:
    assert codes(*seen) == [code]


def test_a_warning_ends_once_the_run_is_well_again() -> None:
    sick = drawn(by_length=32)
    assert codes(sick, *[drawn()] * (WINDOW - 1)) == []
    assert codes(taught(loss=math.nan), *[taught()] * WINDOW) == []


def test_few_samples_give_no_warning() -> None:
    assert codes(drawn(samples=15, by_length=15)) == []


def test_kl_is_kept_by_the_age_of_the_samplers_weights() -> None:
    health = RunHealth()
    health.observe(drawn(trainer_step=3))
    for step in (3, 4, 5):
        health.observe(Stepped(grad_norm=1.0, trainer_step=step))
        health.observe(taught(kl=step / 1000))
    assert health.view()["kl"] == {"0": 0.003, "1": 0.004, "2": 0.005}


def test_limits_are_set_by_name() -> None:
    health = RunHealth(check_limits({"ended_by_length": 0.9}))
    health.observe(drawn(by_length=20))
    assert health.view()["warnings"] == []
    with pytest.raises(InvalidRequestError, match=r"no threshold 'kl'.*kl_same_weights"):
        check_limits({"kl": 1.0})
    with pytest.raises(InvalidRequestError, match="0 or more"):
        check_limits({"clipped": math.nan})


COUNTS = st.integers(0, 100)


@given(
    st.lists(
        st.one_of(
            st.tuples(COUNTS, COUNTS).map(
                lambda n: drawn(samples=max(n), by_length=min(n), past_end=min(n))
            ),
            st.floats().map(lambda x: taught(loss=x, kl=x)),
            st.tuples(st.floats(), COUNTS).map(
                lambda x: Stepped(grad_norm=x[0], trainer_step=x[1])
            ),
        ),
        max_size=40,
    )
)
def test_every_warning_is_a_figure_above_its_limit(seen: list[Observation]) -> None:
    health = RunHealth()
    for each in seen:
        health.observe(each)
        health.check_invariants()
    view = health.view()
    for warning in view["warnings"]:
        assert warning["value"] == view["figures"][warning["code"]] > warning["threshold"]
        assert warning["threshold"] == THRESHOLDS[warning["code"]].limit


def test_views_of_several_routers_are_one() -> None:
    one, other = RunHealth(), RunHealth()
    one.observe(drawn(by_length=20))
    other.observe(drawn(by_length=30))
    other.observe(GivenRewards(total=20, failed=20))
    merged = merge_views([one.view(), other.view()])
    assert [(w["code"], w["value"]) for w in merged["warnings"]] == [
        ("ended_by_length", 30 / 32),
        ("failed_rewards", 1.0),
    ]


def test_samples_that_run_through_an_end_token_are_counted() -> None:
    arrays = {
        "tokens": np.array([5, 2, 5, 5, 2, 9, 5, 2, 5], np.int32),
        "lengths": np.array([3, 2, 0, 2, 2], np.int32),
        "finish": np.array([1, 0, 1, 1, 2], np.int32),
    }
    seen = generated(arrays, {"trainer_step": 4}, [2, 9], keeps_cache=False, max_tokens=64)
    # The second ends with its end token; the last one was interrupted.
    assert seen == GeneratedSamples(samples=4, by_length=3, past_end=2, old_cache=0, trainer_step=4)
    short = generated(arrays, {}, [2, 9], keeps_cache=False, max_tokens=3)
    assert short.by_length == 0


def test_samples_over_a_sync_with_an_old_cache_are_counted() -> None:
    arrays = {
        "tokens": np.zeros(6, np.int32),
        "lengths": np.array([3, 3], np.int32),
        "finish": np.array([0, 1], np.int32),
    }
    result = {"segments": [[1, 0, 1, 1], [1, 2, 2, 2]]}
    kept = generated(arrays, result, [], keeps_cache=True, max_tokens=64)
    assert (kept.old_cache, kept.past_end) == (1, 0)
    assert generated(arrays, result, [], keeps_cache=False, max_tokens=64).old_cache == 0


def test_rows_without_advantage_are_counted() -> None:
    arrays = {
        "lengths": np.array([3, 3, 2], np.int32),
        "mask": np.array([0, 1, 1, 0, 1, 1, 0, 0], np.float32),
        "advantages": np.array([9, 0, 0, 0, -1, 1, 0, 0], np.float32),
    }
    seen = trained([arrays, {"lengths": np.array([2])}], {"loss": None, "old_kl": 0.5})
    # The last row has no token that counts.
    assert (seen.rows, seen.flat_rows, seen.kl, seen.clip_fraction) == (2, 1, 0.5, None)
    assert math.isnan(seen.loss)
    assert stepped({}, is_refused=True).trainer_step is None


def test_end_tokens_of_a_model_are_also_those_that_its_generation_config_lacks() -> None:
    files = {
        "tokenizer.json": '{"added_tokens": [{"id": 7, "content": "<|im_end|>"},'
        ' {"id": 8, "content": "<tool>"}]}',
        "generation_config.json": '{"eos_token_id": 3}',
    }
    assert end_tokens(files) == (3, 7)


def test_the_divergence_is_not_judged_before_the_trainers_step_is_known() -> None:
    assert codes(drawn(trainer_step=7), taught(kl=0.02)) == []


def test_a_batch_is_judged_by_its_own_weights_not_by_those_of_the_newest_samples() -> None:
    stepped_twice = (Stepped(grad_norm=1.0, trainer_step=2), drawn(trainer_step=2))
    assert codes(*stepped_twice, taught(kl=0.02)) == ["kl_same_weights"]
    assert codes(*stepped_twice, taught(kl=0.02, sampled_step=1)) == []
    newer = (*stepped_twice, drawn(trainer_step=1))
    assert codes(*newer, taught(kl=0.02, sampled_step=2)) == ["kl_same_weights"]
    # The samples of the batch came by another router.
    unseen = Stepped(grad_norm=1.0, trainer_step=2)
    assert codes(unseen, taught(kl=0.2, sampled_step=1)) == ["kl_older_weights"]
    # So did later steps: how far behind the batch is cannot be known.
    assert codes(unseen, taught(kl=0.2, sampled_step=3)) == []


def test_a_critic_counts_for_numbers_that_are_not_finite_alone() -> None:
    step = Stepped(grad_norm=math.inf, trainer_step=9)
    assert codes(of_critic(step)) == ["not_finite"]
    values = taught(clip_fraction=0.9, flat_rows=32, kl=5.0)
    actor = (drawn(trainer_step=2), Stepped(grad_norm=1.0, trainer_step=2))
    assert codes(*actor, of_critic(replace(step, grad_norm=1.0)), of_critic(values)) == []
    assert codes(*actor, of_critic(replace(step, grad_norm=1.0)), taught(kl=0.02)) == [
        "kl_same_weights"
    ]
