"""Checks of deployment requests: backend, layout, model and sizes."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from plexrl.errors import (
    InvalidRequestError,
    LayoutError,
    ModelDoesNotFitError,
    UnsupportedDtypeError,
    UnsupportedModelError,
)
from plexrl.model.layout import with_layout
from plexrl.model.memory.device_memory import device_memory
from plexrl.model.memory.kv_cache import kv_token_bytes
from plexrl.model.memory.state_terms import state_terms
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import tiny_qwen2
from plexrl.router.http.deployment_checks import (
    check_deployment,
    state_bytes,
    with_fitting_length,
)
from plexrl.router.http.schemas import DeploymentRequest


def request(kind: str = "train", **fields: Any) -> DeploymentRequest:
    model = tiny_qwen2("0123456789")
    sent = {"architecture": model.architecture, "config_json": model.config_json}
    return DeploymentRequest.model_validate({"name": "a", "kind": kind, "model": sent, **fields})


@pytest.mark.parametrize(
    ("fields", "dp"),
    [
        ({}, 1),
        ({"workers": 3}, 3),
        ({"parallelism": {"dp": 4}}, 4),
        ({"workers": 4, "parallelism": {"dp": 4}}, 4),
    ],
)
def test_the_layout_and_the_number_of_workers_follow_from_one_another(
    fields: dict[str, Any], dp: int
) -> None:
    spec, _ = check_deployment(request(**fields))
    assert spec.backend == "fsdp"
    assert spec.workers == spec.layout.world_size == dp
    assert spec.parallelism == Parallelism(dp=dp)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"workers": 3, "parallelism": {"dp": 4}}, "workers", "workers is 3, but dp=4 needs 4"),
        ({"parallelism": {"dp": 2, "ep": 3}}, "ep", "ep must divide tp·cp·dp"),
        ({"parallelism": {"dp": 2, "cp": 2}}, "cp", "'fsdp' does not support cp.*fsdp: dp, tp"),
        ({"parallelism": {"tp": 4}}, "tp", "num_key_value_heads is 2.*use 2"),
        ({"parallelism": {"pp": 2}}, "pp", "does not support pp"),
        ({"backend": "megatron", "parallelism": {"pp": 3}}, "pp", "2 layers"),
    ],
)
def test_an_invalid_layout_is_refused_by_field(
    fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(LayoutError, match=message) as refused:
        check_deployment(request(**fields))
    assert refused.value.details["field"] == field


@pytest.mark.parametrize("field", ["max_sequence_tokens", "max_concurrent_samples"])
def test_engine_limits_are_checked_before_creation(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        request("rollout", **{field: 10**9})


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 2**80])
@pytest.mark.parametrize("where", ["model", "lora"])
def test_an_out_of_range_seed_is_refused(where: str, seed: int) -> None:
    sent: dict[str, Any] = {
        "model": {"architecture": "qwen2", "seed": seed},
        "lora": {"rank": 1, "seed": seed},
    }
    with pytest.raises(ValidationError, match=f"{where}.seed"):
        request(**{where: sent[where]})


def test_state_bytes_count_what_megatron_replicates() -> None:
    bytes_per_parameter = {}
    for layout in ({"tp": 2}, {"dp": 2}, {"dp": 2, "tp": 2, "pp": 2}):
        spec, count = check_deployment(request(backend="megatron", parallelism=layout))
        bytes_per_parameter[spec.layout.describe()] = state_bytes(spec, count) // count
    # Parameters and reduction buffers on both data ranks, gradients and moments once.
    assert bytes_per_parameter == {"tp=2": 16, "dp=2": 28, "dp=2 tp=2 pp=2": 28}
    # In bfloat16 both data ranks have a cast besides, and the parameters are there once.
    body = request(backend="megatron", parallelism={"dp": 2}, compute_dtype="bfloat16")
    spec, count = check_deployment(body)
    assert state_bytes(spec, count) == (16 + 2 * (4 + 2)) * count


def test_a_trainer_may_use_bf16_and_activation_checkpointing() -> None:
    fields: dict[str, Any] = {"compute_dtype": "bfloat16", "activation_checkpointing": True}
    spec, _ = check_deployment(request(parallelism={"dp": 2, "tp": 2}, **fields))
    assert (spec.compute_dtype, spec.activation_checkpointing) == ("bfloat16", True)
    assert spec.layout == Parallelism(dp=2, tp=2)
    with pytest.raises(UnsupportedDtypeError, match="trains in float32, not bfloat16"):
        check_deployment(request("rollout", compute_dtype="bfloat16"))
    with pytest.raises(InvalidRequestError, match=r"has no activation_checkpointing.*fsdp"):
        check_deployment(request("forward", activation_checkpointing=True))
    assert check_deployment(request(reduce_once=True))[0].reduce_once
    with pytest.raises(InvalidRequestError, match=r"'deepspeed'.*no reduce_once.*fsdp or megatron"):
        check_deployment(request(backend="deepspeed", reduce_once=True))


def test_a_rollout_deployment_runs_on_one_gpu_on_replicas_or_on_tensor_ranks() -> None:
    spec, parameters = check_deployment(request("rollout"))
    assert (spec.backend, spec.workers, spec.layout) == ("torch", 1, Parallelism())
    assert state_bytes(spec, parameters) == 4 * parameters
    spec, _ = check_deployment(request("rollout", parallelism={"dp": 3, "tp": 2}))
    assert spec.workers == 6
    assert state_bytes(spec, parameters) == 3 * 4 * parameters
    with pytest.raises(LayoutError, match="torch: dp, tp"):
        check_deployment(request("rollout", parallelism={"pp": 2}))
    with pytest.raises(LayoutError, match=r"tp is 4 .* num_key_value_heads is 2"):
        check_deployment(request("rollout", parallelism={"tp": 4}))
    with pytest.raises(LayoutError, match="adapters only without tp"):
        check_deployment(request("rollout", parallelism={"tp": 2}, lora={"rank": 2}))
    # Each of two ranks caches one of the two heads.
    budget = {"max_sequence_tokens": 100, "kv_cache_bytes": 256 * 112}
    check_deployment(request("rollout", parallelism={"tp": 2}, **budget))
    with pytest.raises(InvalidRequestError, match="needs 57344 bytes"):
        check_deployment(request("rollout", **budget))


def test_an_engine_that_switches_holds_the_shares_of_its_smallest_group() -> None:
    fields: dict[str, Any] = {"parallelism": {"dp": 3, "tp": 2}, "tp_sizes": [1, 2]}
    spec, parameters = check_deployment(request("rollout", **fields))
    assert (spec.tp_sizes, spec.shares, spec.workers) == ((1, 2), 1, 6)
    assert state_bytes(spec, parameters) == 6 * 4 * parameters
    # Alone, each rank caches both heads.
    fields |= {"max_sequence_tokens": 100, "kv_cache_bytes": 512 * 112 - 1}
    with pytest.raises(InvalidRequestError, match="needs 57344 bytes"):
        check_deployment(request("rollout", **fields))


@pytest.mark.parametrize("sizes", [[2], [1], [1, 1, 2], [2, 1], [2, 3], [0, 2]])
def test_group_sizes_that_do_not_divide_the_next_are_refused(sizes: list[int]) -> None:
    body = {"parallelism": {"tp": 2}}
    with pytest.raises((LayoutError, ValidationError), match=r"tp_sizes|greater than"):
        check_deployment(request("rollout", **body, tp_sizes=sizes))


def test_group_sizes_are_refused_where_groups_do_not_change() -> None:
    for fields in ({"kind": "train"}, {"kind": "forward"}, {"kind": "rollout", "backend": "vllm"}):
        with pytest.raises(InvalidRequestError, match="do not change: leave it out"):
            check_deployment(request(**fields, tp_sizes=[1, 2]))
    with pytest.raises(LayoutError, match=r"tp_sizes is \[1, 2\] and parallelism\.tp is 1"):
        check_deployment(request("rollout", tp_sizes=[1, 2]))
    spec, _ = check_deployment(request("rollout", parallelism={"tp": 2}, tp_sizes=[1, 2]))
    with pytest.raises(LayoutError, match=r"parallelism\.tp is 1"):
        with_layout(spec, Parallelism(dp=2))


def test_a_cache_must_hold_at_least_one_sequence() -> None:
    # 2 layers, keys and values of 2 heads of 16 float32 numbers: 512 bytes a token.
    least = 512 * 112
    fields = {"max_sequence_tokens": 100, "kv_cache_bytes": least}
    assert check_deployment(request("rollout", **fields))[0].kv_cache_bytes == least
    half = {**fields, "dtype": "bfloat16", "kv_cache_bytes": least // 2}
    assert check_deployment(request("rollout", **half))[0].kv_cache_bytes == least // 2
    fields["kv_cache_bytes"] = least - 1
    with pytest.raises(InvalidRequestError, match=rf"needs {least} bytes on each worker"):
        check_deployment(request("rollout", **fields))
    vllm = {"backend": "vllm", "max_sequence_tokens": 100}
    check_deployment(request("rollout", **vllm, kv_cache_bytes=512 * 128))
    with pytest.raises(InvalidRequestError, match=rf"needs {512 * 128} bytes on each worker"):
        check_deployment(request("rollout", **vllm, kv_cache_bytes=least))
    with pytest.raises(InvalidRequestError, match="has no cache"):
        check_deployment(request(kv_cache_bytes=least))


@pytest.mark.parametrize(
    ("kind", "backend", "head"),
    [
        ("train", "fsdp", "causal"),
        ("train", "megatron", "causal"),
        ("train", "deepspeed", "causal"),
        ("rollout", "torch", "causal"),
        ("rollout", "vllm", "causal"),
        ("forward", "torch", "causal"),
        ("forward", "torch", "reward"),
        ("train", "fsdp", "value"),
    ],
)
@pytest.mark.parametrize("architecture", ["gpt2", "olmoe", "gemma2", "rnn"])
def test_an_unsupported_model_is_refused_with_the_supported_ones(
    kind: str, backend: str, head: str, architecture: str
) -> None:
    model = {"architecture": architecture, "config_json": '{"n_embd": 64}', "head": head}
    with pytest.raises(UnsupportedModelError, match=f"'{architecture}', which .*qwen2") as refused:
        check_deployment(request(kind=kind, backend=backend, model=model))
    assert refused.value.details["architecture"] == architecture
    assert "qwen2" in str(refused.value.details["supported"])


def test_backends_without_experts_refuse_them_with_the_backends_that_run_them() -> None:
    body = request(kind="rollout", backend="vllm", model={"architecture": "qwen3_moe"})
    with pytest.raises(UnsupportedModelError, match=r"megatron \(train\).*torch \(rollout\)"):
        check_deployment(body)


def test_a_head_is_refused_where_no_backend_computes_with_it() -> None:
    def of(head: str) -> dict[str, Any]:
        config_json = tiny_qwen2("0123456789").config_json
        return {"architecture": "qwen2", "config_json": config_json, "head": head}

    for backend in ("fsdp", "megatron", "deepspeed"):
        spec, parameters = check_deployment(request(backend=backend, model=of("value")))
        assert spec.model.head == "value"
        # The head is tied to nothing.
        assert parameters == check_deployment(request(backend=backend))[1] + 64
    assert check_deployment(request(kind="forward", model=of("value")))[0].model.head == "value"
    refused = [
        (request(kind="rollout", backend=backend, model=of(head)), "no rollout backend generates")
        for backend in ("torch", "vllm")
        for head in ("value", "reward")
    ]
    refused += [
        (request(model=of("reward")), "create a reward deployment.*head 'value'"),
        (request(model=of("value"), lora={"rank": 4}), "only adapters are trained"),
        (
            request(model=of("value"), pace="h800:qwen2.5-14b@0.01"),
            "paced deployment has no head 'value'",
        ),
    ]
    for body, message in refused:
        with pytest.raises(InvalidRequestError, match=message):
            check_deployment(body)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def test_experts_are_trained_on_tensor_ranks_by_megatron_and_without_adapters() -> None:
    config = json.dumps({**tiny_qwen2("0123456789").config, **EXPERTS})
    model = {"architecture": "qwen3_moe", "config_json": config}
    body = request(kind="train", backend="fsdp", model=model, parallelism={"tp": 2})
    with pytest.raises(LayoutError, match="tp is 2 and the model has experts") as refused:
        check_deployment(body)
    assert refused.value.details["field"] == "tp"
    for layout in ({"tp": 2}, {"tp": 2, "ep": 4, "cp": 2}, {"tp": 2, "ep": 2, "pp": 2}):
        body = request(kind="train", backend="megatron", model=model, parallelism=layout)
        spec, parameters = check_deployment(body)
        assert state_bytes(spec, parameters) > 16 * parameters
    with pytest.raises(InvalidRequestError, match=r"can have one are q_proj, .*o_proj$"):
        check_deployment(request(kind="train", model=model, lora={"rank": 4}))
    lora = {"rank": 4, "targets": ["q_proj"]}
    for kind, layout in (("train", {"dp": 2}), ("rollout", {"dp": 2})):
        check_deployment(request(kind=kind, model=model, lora=lora, parallelism=layout))
    check_deployment(request(kind="rollout", model=model, parallelism={"tp": 2}))


def test_forward_deployments_are_cut_by_megatron_and_otherwise_refused_by_field() -> None:
    model = {**request().model.model_dump(exclude_none=True)}
    layout = {"tp": 2, "pp": 2}
    whole, parameters = check_deployment(request("forward", model=model))
    for head in ("causal", "reward"):
        cut, _ = check_deployment(
            request(
                "forward", backend="megatron", parallelism=layout, model={**model, "head": head}
            )
        )
        assert cut.workers == 4
        assert state_bytes(cut, parameters) == state_bytes(whole, parameters)
        assert state_terms(cut).weights < state_terms(whole).weights / 2
    with pytest.raises(
        LayoutError, match=r"'torch' does not support tp.*megatron: dp, tp, pp, cp, ep"
    ):
        check_deployment(request("forward", parallelism={"tp": 2}))
    by_rows, _ = check_deployment(request("forward", backend="megatron", parallelism={"cp": 2}))
    assert state_bytes(by_rows, parameters) == 2 * state_bytes(whole, parameters)
    assert state_terms(by_rows).weights == state_terms(whole).weights
    scored = {"parallelism": {"cp": 2}, "model": {**model, "head": "reward"}}
    with pytest.raises(LayoutError, match="scores the last token") as refused:
        check_deployment(request("forward", backend="megatron", **scored))
    assert refused.value.details["field"] == "cp"
    with pytest.raises(LayoutError, match=r"head size is 16: .*multiple of 32 with weights in bfl"):
        check_deployment(request("forward", backend="megatron", dtype="bfloat16"))
    with pytest.raises(InvalidRequestError, match="megatron has all layers of a rank's stage"):
        check_deployment(request("forward", backend="megatron", layers_on_device=2))


def test_a_directory_whose_configuration_names_no_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        check_deployment(request(model={"path": str(tmp_path)}))


MODEL = tiny_qwen2("0123456789")
SIZES = sorted(name for name, value in MODEL.config.items() if not isinstance(value, bool))
ODD = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())


@given(
    st.sampled_from(["llama", "qwen2", "qwen3_moe", "mixtral", "bert"]),
    st.sampled_from(["fsdp", "megatron", "torch", "vllm"]),
    st.dictionaries(
        st.sampled_from([*SIZES, "head_dim", "num_experts", "rms_norm_eps", "num_experts_per_tok"]),
        ODD,
        max_size=3,
    ),
    st.booleans(),
    st.integers(1, 3),
)
def test_any_configuration_is_accepted_or_refused_with_a_typed_error(
    architecture: str, backend: str, changes: dict[str, object], with_lora: bool, tp: int
) -> None:
    kind = "rollout" if backend in ("torch", "vllm") else "train"
    config = json.dumps({**MODEL.config, **changes}).replace("NaN", "null").replace("Infinity", "9")
    body = request(
        kind=kind,
        backend=backend,
        model={"architecture": architecture, "config_json": config},
        parallelism={"tp": tp},
        lora={"rank": 4} if with_lora else None,
        kv_cache_bytes=1 << 20 if kind == "rollout" else None,
    )
    with contextlib.suppress(InvalidRequestError):
        spec, parameters = check_deployment(body)
        assert state_bytes(spec, parameters) > 0


@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_only_forward_deployments_have_layers_in_host_memory(kind: str) -> None:
    assert check_deployment(request("forward", layers_on_device=2))[0].layers_on_device == 2
    with pytest.raises(InvalidRequestError, match="leave it out"):
        check_deployment(request(kind, layers_on_device=2))


@pytest.mark.parametrize(("positions", "bound"), [(300, 300), (8192, 8192), (1 << 20, 8192)])
def test_the_longest_row_is_as_long_as_the_model_allows(positions: int, bound: int) -> None:
    model = tiny_qwen2("01")
    config = {**model.config, "max_position_embeddings": positions}
    body = {"config_json": json.dumps(config), "architecture": "qwen2", "vocabulary": "01"}
    spec, _ = check_deployment(request(model=body))
    assert spec.max_sequence_tokens == bound


def test_the_longest_row_of_a_rollout_fits_into_its_cache() -> None:
    whole, _ = check_deployment(request(kind="rollout"))
    budget = 5 * 16 * kv_token_bytes(whole) + 1
    spec, _ = check_deployment(request(kind="rollout", kv_cache_bytes=budget))
    assert (whole.max_sequence_tokens, spec.max_sequence_tokens) == (512, 80)


def test_adapters_of_a_rank_beyond_the_layer_are_refused() -> None:
    spec, _ = check_deployment(request(lora={"rank": 32, "targets": ["k_proj"]}))
    assert spec.lora is not None
    with pytest.raises(InvalidRequestError, match=r"lora.rank is 33, and k_proj has 64 inputs"):
        check_deployment(request(lora={"rank": 33, "targets": ["q_proj", "k_proj"]}))


LONG = {"max_position_embeddings": 1 << 20}


@given(
    kind=st.sampled_from(["train", "forward", "rollout"]),
    tokens=st.integers(3, 1 << 20),
    part=st.floats(0.01, 1.0),
    is_default=st.booleans(),
)
def test_a_deployment_that_does_not_fit_is_told_the_longest_rows_that_would(
    kind: str, tokens: int, part: float, is_default: bool
) -> None:
    model = tiny_qwen2("0123456789")
    config = json.dumps({**json.loads(model.config_json or ""), **LONG})
    sent = {"architecture": model.architecture, "config_json": config}
    fields = {"name": "a", "kind": kind, "model": sent, "max_sequence_tokens": tokens}
    spec, _ = check_deployment(DeploymentRequest.model_validate(fields))
    memory = int(device_memory(spec).need_bytes * part) - 1
    refusal = ModelDoesNotFitError("too large", terms={}, gpu_memory_bytes=memory)
    found = with_fitting_length(refusal, spec, is_default=is_default)
    fitting = found.details["max_sequence_tokens"]

    def need(length: int) -> int:
        return device_memory(replace(spec, max_sequence_tokens=length)).need_bytes

    assert f"max_sequence_tokens is {tokens}{', the default' * is_default}: " in found.message
    assert found.details["gpu_memory_bytes"] == memory
    if fitting is None:
        assert "no smaller one makes it fit" in found.message
        assert need(2) > memory
    else:
        assert isinstance(fitting, int)
        assert f"with {fitting} or less it fits" in found.message
        assert need(fitting) <= memory < need(fitting + 1)


def test_another_refusal_is_left_as_it_is() -> None:
    spec, _ = check_deployment(request())
    refusal = ModelDoesNotFitError("the tiers are full", host_memory_bytes=1)
    assert with_fitting_length(refusal, spec, is_default=True) is refusal


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("train", {"pace": "h800"}, "GPU:MODEL@SCALE"),
        ("forward", {"pace": "h800:qwen2.5-7b"}, "no kind 'forward'"),
        ("train", {"pace": "h800:qwen2.5-7b", "optimizer": "host"}, "no optimizer='host'"),
        ("train", {"pace": "h800:qwen2.5-7b", "lora": {"rank": 2}}, "no lora"),
        ("rollout", {"pace": "h800:qwen2.5-7b", "backend": "vllm"}, "no backend 'vllm'"),
        ("rollout", {"pace": "h800:qwen2.5-72b"}, "room for 145 GB"),
        ("rollout", {"pace": "h800:qwen2.5-7b", "kv_cache_bytes": 1 << 20}, "no kv_cache_bytes"),
        ("rollout", {"pace": "h800:qwen2.5-7b", "cuda_graphs": False}, "no cuda_graphs=False"),
        ("rollout", {"pace": "h800:qwen2.5-7b", "dtype": "bfloat16"}, "no dtype 'bfloat16'"),
        (
            "train",
            {"pace": "h800:qwen2.5-7b", "activation_checkpointing": True},
            "no activation_checkpointing",
        ),
        ("train", {"pace": "h800:qwen2.5-7b", "reduce_once": True}, "no reduce_once"),
        (
            "train",
            {"pace": "h800:qwen2.5-7b", "compute_dtype": "bfloat16"},
            "no compute_dtype 'bfloat16'",
        ),
    ],
)
def test_a_pace_that_cannot_run_is_refused_before_anything_starts(
    kind: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_deployment(request(kind, **fields))


def test_a_pace_is_part_of_the_specification() -> None:
    spec, _ = check_deployment(request(pace="h800:qwen2.5-7b@0.01", workers=4))
    assert (spec.pace, spec.workers, spec.backend) == ("h800:qwen2.5-7b@0.01", 4, "fsdp")
