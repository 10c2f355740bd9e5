"""Invalid operations are refused before anything changes, with the position of the fault."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import (
    BatchShapeError,
    InvalidRequestError,
    NonFiniteInputError,
    NoTokenCountsError,
    TokenRangeError,
)
from plexrl.limits import RESULT_BYTES_MAX
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import tiny_qwen2
from plexrl.router.http import operation_checks
from plexrl.router.http.operation_checks import check_operation, check_source
from plexrl.wire.tensors import Arrays

MODEL = tiny_qwen2("0123456789")
VOCABULARY_SIZE = 13
TRAIN = DeploymentSpec(model=MODEL, kind="train", backend="fsdp", workers=1, max_sequence_tokens=32)
ROLLOUT = DeploymentSpec(
    model=MODEL, kind="rollout", backend="torch", workers=1, max_sequence_tokens=32
)
GRPO = {"loss": {"name": "grpo"}}


def batch(lengths: list[int]) -> Arrays:
    total = sum(lengths)
    return {
        "tokens": np.full(total, 3, dtype=np.int32),
        "lengths": np.array(lengths, dtype=np.int32),
        **{name: np.ones(total, dtype=np.float32) for name in ("mask", "logprobs", "advantages")},
    }


@given(st.lists(st.integers(2, 32), min_size=1, max_size=10))
def test_a_valid_batch_is_accepted_with_its_size(lengths: list[int]) -> None:
    checked = check_operation(TRAIN, "forward_backward", GRPO, batch(lengths))
    assert checked.tokens == sum(lengths)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.data(),
    st.sampled_from([-1, VOCABULARY_SIZE, 2**31 - 1]),
)
def test_a_token_outside_the_vocabulary_is_reported_with_its_position(
    lengths: list[int], data: st.DataObject, token: int
) -> None:
    arrays = batch(lengths)
    row = data.draw(st.integers(0, len(lengths) - 1))
    position = data.draw(st.integers(0, lengths[row] - 1))
    arrays["tokens"][sum(lengths[:row]) + position] = token
    with pytest.raises(TokenRangeError) as refused:
        check_operation(TRAIN, "forward_backward", GRPO, arrays)
    assert refused.value.details == {"row": row, "position": position}


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.data(),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.sampled_from(["mask", "logprobs", "advantages"]),
)
def test_a_non_finite_value_is_reported_with_its_position(
    lengths: list[int], data: st.DataObject, value: float, name: str
) -> None:
    arrays = batch(lengths)
    row = data.draw(st.integers(0, len(lengths) - 1))
    position = data.draw(st.integers(0, lengths[row] - 1))
    arrays[name][sum(lengths[:row]) + position] = value
    with pytest.raises(NonFiniteInputError) as refused:
        check_operation(TRAIN, "forward_backward", GRPO, arrays)
    assert refused.value.details == {"array": name, "row": row, "position": position}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": np.array([2, 2], dtype=np.int32)}, "add up to 4"),
        ({"lengths": np.array([0, 5], dtype=np.int32)}, "row 0 has 0 tokens"),
        ({"lengths": np.empty(0, dtype=np.int32)}, "no rows"),
        ({"tokens": np.full(5, 3, dtype=np.int64)}, "tokens must be a one-dimensional int32"),
        ({"mask": np.ones(4, dtype=np.float32)}, r"float32\[5\] is needed"),
        ({"mask": np.ones(5, dtype=np.float64)}, "mask is float64"),
        ({"mood": np.ones(5, dtype=np.float32)}, "mood are not used"),
    ],
)
def test_arrays_of_a_wrong_shape_are_refused(change: Arrays, message: str) -> None:
    with pytest.raises(BatchShapeError, match=message):
        check_operation(TRAIN, "forward_backward", GRPO, {**batch([2, 3]), **change})


def test_a_row_over_the_sequence_limit_is_refused() -> None:
    with pytest.raises(BatchShapeError, match="row 1 has 33 tokens"):
        check_operation(TRAIN, "forward_backward", GRPO, batch([2, 33]))


def test_a_batch_with_an_all_zero_mask_is_refused() -> None:
    nothing, first_only = batch([2, 3]), batch([2, 3])
    nothing["mask"][:] = 0.0
    first_only["mask"][:] = [1.0, 0.0, 1.0, 0.0, 0.0]
    for arrays in (nothing, first_only, batch([1, 1])):
        with pytest.raises(NoTokenCountsError, match="no token of the batch counts"):
            check_operation(TRAIN, "forward_backward", GRPO, arrays)


def test_rows_with_an_all_zero_mask_are_allowed_among_others() -> None:
    arrays = batch([2, 3, 1])
    arrays["mask"][:] = [0.0, 0.0, 0.0, 0.5, 0.0, 0.0]
    assert check_operation(TRAIN, "forward_backward", GRPO, arrays).tokens == 6


def test_advantages_and_custom_weights_may_all_be_zero() -> None:
    alike = batch([2, 3])
    alike["advantages"][:] = 0.0
    check_operation(TRAIN, "forward_backward", GRPO, alike)
    weights = {"weights": np.zeros(5, dtype=np.float32)}
    arrays = {name: alike[name] for name in ("tokens", "lengths")} | weights
    check_operation(TRAIN, "forward_backward", {"loss": {"name": "custom"}}, arrays)


def test_a_negative_mask_is_refused_with_its_position() -> None:
    arrays = batch([2, 3])
    arrays["mask"][3] = -1.0
    with pytest.raises(InvalidRequestError, match="mask is -1 in row 1 at position 1") as refused:
        check_operation(TRAIN, "forward_backward", GRPO, arrays)
    assert refused.value.details == {"row": 1, "position": 1}


@pytest.mark.parametrize(
    ("spec", "kind", "params", "message"),
    [
        (TRAIN, "generate", {}, "not an operation of a train deployment"),
        (ROLLOUT, "optim_step", {"learning_rate": 1}, "not an operation of a rollout deployment"),
        (ROLLOUT, "publish", {}, "not an operation of a rollout deployment"),
        (TRAIN, "optim_step", {}, "learning_rate"),
        (TRAIN, "optim_step", {"learning_rate": 0.1, "betas": 1}, "no parameter 'betas'"),
        (TRAIN, "optim_step", {"learning_rate": float("nan")}, "at least 0"),
        (TRAIN, "optim_step", {"learning_rate": 0.1, "beta1": 1.0}, "beta1 is 1.0"),
        (TRAIN, "forward_backward", {"loss": {"name": "sgd"}}, "sgd"),
        (TRAIN, "forward_backward", {"loss": {"name": "ppo", "clip": 1}}, "no parameter 'clip'"),
        (TRAIN, "forward_backward", {"loss": {"name": "ppo", "clip_low": -1}}, "clip_low"),
        (TRAIN, "save_checkpoint", {"name": "a/b"}, "letters, digits"),
        (TRAIN, "save_checkpoint", {"name": ".."}, "letters, digits"),
        (ROLLOUT, "generate", {"samples_per_prompt": 0}, r"samples_per_prompt \(n\) is 0"),
        (ROLLOUT, "generate", {"sampling": {"temperature": -1}}, "temperature"),
        (ROLLOUT, "generate", {"sampling": {"top_p": 1.5}}, "top_p"),
        (ROLLOUT, "generate", {"sampling": {"max_tokens": 0}}, "max_tokens is 0"),
        (ROLLOUT, "generate", {"sampling": {"max_tokens": 1 << 40}}, "max_tokens is"),
        (ROLLOUT, "generate", {"sampling": {"top_k": 1 << 40}}, "top_k is"),
        (ROLLOUT, "generate", {"samples_per_prompt": 1 << 40}, r"samples_per_prompt \(n\) is"),
        (ROLLOUT, "generate", {"sampling": {"beams": 4}}, "no parameter 'beams'"),
    ],
)
def test_invalid_parameters_are_refused(
    spec: DeploymentSpec, kind: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_operation(spec, kind, params, {})


def test_a_loss_over_whole_rows_is_refused_where_ranks_share_them() -> None:
    shared = replace(TRAIN, backend="megatron", workers=2, parallelism=Parallelism(cp=2))
    loss = {"loss": {"name": "gspo"}}
    with pytest.raises(InvalidRequestError, match=r"parallelism\.cp is 2") as refused:
        check_operation(shared, "forward_backward", loss, batch([2, 3]))
    assert refused.value.details == {"parameter": "loss"}
    assert check_operation(TRAIN, "forward_backward", loss, batch([2, 3])).tokens == 5
    assert check_operation(shared, "forward_backward", GRPO, batch([2, 3])).tokens == 5


PACE = "h800:qwen2.5-7b@0.01"


@pytest.mark.parametrize(
    ("spec", "kind", "params", "message"),
    [
        (TRAIN, "save_checkpoint", {"name": "c"}, "no save_checkpoint"),
        (TRAIN, "load_checkpoint", {"name": "c"}, "no load_checkpoint"),
        (ROLLOUT, "load_checkpoint", {"name": "c"}, "no load_checkpoint"),
        (ROLLOUT, "generate", {"sampling": {"stop_token_ids": [4]}}, "leave the stop parameters"),
        (ROLLOUT, "generate", {"sampling": {"stop_sequences": [[4]]}}, "leave the stop parameters"),
        (ROLLOUT, "generate", {"sampling": {"top_logprobs": 2}}, "no distribution of tokens"),
        (ROLLOUT, "generate", {"sampling": {"prompt_logprobs": True}}, "no distribution of tokens"),
        (TRAIN, "forward", {"entropy": True}, "leave entropy and top_logprobs out"),
        (TRAIN, "forward", {"top_logprobs": 1}, "leave entropy and top_logprobs out"),
    ],
)
def test_what_a_paced_deployment_cannot_do_is_refused_at_submission(
    spec: DeploymentSpec, kind: str, params: dict[str, Any], message: str
) -> None:
    arrays = batch([4]) if kind in ("generate", "forward") else {}
    arrays = {name: arrays[name] for name in ("tokens", "lengths") if name in arrays}
    check_operation(spec, kind, params, arrays)
    with pytest.raises(InvalidRequestError, match=message):
        check_operation(replace(spec, pace=PACE), kind, params, arrays)


def test_paced_and_computed_deployments_do_not_exchange_weights() -> None:
    paced_train, paced_rollout = replace(TRAIN, pace=PACE), replace(ROLLOUT, pace=PACE)
    check_source(ROLLOUT, TRAIN)
    check_source(paced_rollout, paced_train)
    with pytest.raises(InvalidRequestError, match="this deployment is paced and has no model"):
        check_source(paced_rollout, TRAIN)
    with pytest.raises(InvalidRequestError, match="the source is paced and has no model"):
        check_source(ROLLOUT, paced_train)


NUMBERS = (
    {"sampling_logprobs": True},
    {"top_logprobs": 2},
    {"prompt_logprobs": True},
    {"prompt_top_logprobs": 2},
)


@pytest.mark.parametrize("sampling", NUMBERS, ids=str)
def test_numbers_of_tokens_that_an_engine_does_not_compute_are_refused_by_name(
    sampling: dict[str, Any],
) -> None:
    arrays = {name: batch([4])[name] for name in ("tokens", "lengths")}
    params = {"sampling": sampling}
    check_operation(ROLLOUT, "generate", params, arrays)
    with pytest.raises(InvalidRequestError, match="backend 'vllm' returns"):
        check_operation(replace(ROLLOUT, backend="vllm"), "generate", params, arrays)
    groups = replace(ROLLOUT, workers=2, parallelism=Parallelism(tp=2), tp_sizes=(1, 2))
    if next(iter(sampling)).startswith("prompt"):
        with pytest.raises(InvalidRequestError, match="a deployment with tp_sizes"):
            check_operation(groups, "generate", params, arrays)
    else:
        check_operation(groups, "generate", params, arrays)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("generate", {"sampling": {"top_logprobs": VOCABULARY_SIZE + 1}}),
        ("generate", {"sampling": {"prompt_top_logprobs": VOCABULARY_SIZE + 1}}),
        ("forward", {"top_logprobs": VOCABULARY_SIZE + 1}),
    ],
)
def test_more_alternatives_than_tokens_are_refused(kind: str, params: dict[str, Any]) -> None:
    arrays = {name: batch([4])[name] for name in ("tokens", "lengths")}
    with pytest.raises(InvalidRequestError, match="ask for at most 13"):
        check_operation(ROLLOUT if kind == "generate" else TRAIN, kind, params, arrays)


@pytest.mark.parametrize(
    ("sampling", "bytes_of_a_token"),
    [
        ({}, 8),
        ({"sampling_logprobs": True}, 12),
        ({"top_logprobs": 7}, 64),
        ({"top_logprobs": 7, "sampling_logprobs": True}, 68),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_array", [False, True], ids=["max_tokens", "max_tokens by prompt"])
def test_a_generation_whose_result_may_be_too_large_is_refused(
    sampling: dict[str, Any], bytes_of_a_token: int, in_array: bool
) -> None:
    samples, arrays = 32_768, {name: batch([4])[name] for name in ("tokens", "lengths")}
    rollout = replace(ROLLOUT, max_sequence_tokens=1 << 20)

    def check(most: int) -> None:
        wanted = {**sampling, "max_tokens": 1 if in_array else most}
        by_prompt = {"max_tokens": np.array([most])} if in_array else {}
        params = {"sampling": wanted, "samples_per_prompt": samples}
        check_operation(rollout, "generate", params, {**arrays, **by_prompt})

    largest = RESULT_BYTES_MAX // (samples * bytes_of_a_token)
    check(largest)
    with pytest.raises(BatchShapeError, match=f"at most {RESULT_BYTES_MAX}: split the prompts"):
        check(largest + 1)


@pytest.mark.parametrize(
    ("spec", "kind", "params"),
    [
        (TRAIN, "forward", {"top_logprobs": 13, "entropy": True}),
        (ROLLOUT, "generate", {"sampling": {"prompt_top_logprobs": 13, "max_tokens": 1}}),
    ],
)
def test_alternatives_of_more_tokens_than_a_result_may_have_are_refused(
    spec: DeploymentSpec, kind: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A batch that meets the real bound has 300 MB.
    monkeypatch.setattr(operation_checks, "RESULT_BYTES_MAX", 40 * (8 + 8 * 13))
    few, many = (
        {name: batch([20] * rows)[name] for name in ("tokens", "lengths")} for rows in (2, 3)
    )
    check_operation(spec, kind, params, few)
    with pytest.raises(BatchShapeError, match="the result may have"):
        check_operation(spec, kind, params, many)


def test_a_reward_model_has_no_distribution() -> None:
    model = tiny_qwen2("0123456789", head="reward")
    judge = replace(TRAIN, kind="forward", backend="torch", model=model)
    arrays = {name: batch([4])[name] for name in ("tokens", "lengths")}
    check_operation(judge, "forward", {}, arrays)
    with pytest.raises(InvalidRequestError, match="predicts no tokens"):
        check_operation(judge, "forward", {"entropy": True}, arrays)


CRITIC = replace(TRAIN, model=tiny_qwen2("0123456789", head="value"))


def test_each_head_has_its_losses() -> None:
    arrays = {name: batch([4])[name] for name in ("tokens", "lengths", "mask")}
    ones = np.ones(4, dtype=np.float32)
    value = {"loss": {"name": "value", "value_clip": 0.2}}
    check_operation(CRITIC, "forward_backward", value, {**arrays, "returns": ones, "values": ones})
    plain = {name: arrays[name] for name in ("tokens", "lengths")}
    custom = {"loss": {"name": "custom"}}
    check_operation(CRITIC, "forward_backward", custom, {**plain, "weights": ones})
    with pytest.raises(BatchShapeError, match="needs the per-token arrays values"):
        check_operation(CRITIC, "forward_backward", value, {**arrays, "returns": ones})
    with pytest.raises(InvalidRequestError, match=r"grpo needs logprobs.*use value or custom"):
        check_operation(CRITIC, "forward_backward", GRPO, batch([4]))
    with pytest.raises(InvalidRequestError, match=r"value needs values.*head 'causal'"):
        check_operation(TRAIN, "forward_backward", value, arrays)
    with pytest.raises(InvalidRequestError, match="head 'value', which predicts no tokens"):
        check_operation(CRITIC, "forward", {"entropy": True}, plain)


def test_weights_are_synced_between_equal_heads_only() -> None:
    copy = replace(CRITIC, kind="forward", backend="torch")
    check_source(copy, CRITIC)
    for target, source in ((ROLLOUT, CRITIC), (copy, TRAIN)):
        with pytest.raises(InvalidRequestError, match="create both with the same head"):
            check_source(target, source)


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "megatron"},
        {"backend": "deepspeed", "optimizer": "host"},
        {"optimizer": "host"},
    ],
    ids=str,
)
def test_muon_is_refused_where_no_rank_has_whole_matrices(changes: dict[str, Any]) -> None:
    params = {"learning_rate": 0.1, "optimizer": "muon"}
    check_operation(TRAIN, "optim_step", params, {})
    check_operation(replace(TRAIN, backend="deepspeed"), "optim_step", params, {})
    wide = replace(TRAIN, workers=2, parallelism=Parallelism(tp=2))
    check_operation(wide, "optim_step", params, {})
    with pytest.raises(InvalidRequestError, match="'muon' steps whole matrices") as refused:
        check_operation(replace(TRAIN, **changes), "optim_step", params, {})
    assert refused.value.details == {"parameter": "optimizer"}
    check_operation(replace(TRAIN, **changes), "optim_step", {**params, "optimizer": "sgd"}, {})


def test_adamw_has_no_momentum() -> None:
    params = {"learning_rate": 0.1, "momentum": 0.9}
    with pytest.raises(InvalidRequestError, match="AdamW has none: set beta1"):
        check_operation(TRAIN, "optim_step", params, {})
