"""Parameter counts are those of `transformers`."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, LayoutError, UnsupportedModelError
from plexrl.model.architecture.families import ARCHITECTURES, FAMILIES, Family
from plexrl.model.capabilities import BACKENDS, BackendCapabilities, check_architecture
from plexrl.model.layout import check_tensor_parallel
from plexrl.model.lora import linear_sizes
from plexrl.model.memory.state_terms import tensors
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec, parameter_count, tiny_qwen2
from tests.examples import examples

SIZED = ("llama", "gemma3_text", "glm4", "phi3", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose configuration classes have sizes of their own."""


@given(
    architecture=st.sampled_from(ARCHITECTURES),
    heads=st.sampled_from((2, 4)),
    layers=st.integers(1, 3),
    head_dim=st.sampled_from((8, 16)),
    tied=st.booleans(),
    biased=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_the_count_is_exact(
    architecture: str, heads: int, layers: int, head_dim: int, tied: bool, biased: bool
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config: dict[str, object] = {
        "vocab_size": 50,
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "tie_word_embeddings": tied,
        "attention_bias": biased,
        "mlp_bias": biased,
        "pad_token_id": 0,
    }
    if architecture == "qwen3_moe":
        config |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if architecture in ("mixtral", "gpt_oss"):
        config |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    if architecture.startswith("qwen3_5"):
        config |= {"linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads}
        config["layer_types"] = (["full_attention", "linear_attention"] * layers)[:layers]
    if architecture == "qwen3_5_moe_text":
        config |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    spec = ModelSpec(architecture=architecture, config_json=msgspec.json.encode(config).decode())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config))
    assert parameter_count(spec) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("architecture", SIZED)
def test_sizes_that_a_configuration_leaves_out_are_those_of_its_class(architecture: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4}
    config = {**given, "intermediate_size": 96, "vocab_size": 50, "pad_token_id": 0}
    spec = ModelSpec(architecture=architecture, config_json=msgspec.json.encode(config).decode())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config))
    assert parameter_count(spec) == sum(p.numel() for p in model.parameters())
    # Where some layers have linear attention, every fourth has not.
    modules = model.get_decoder().layers[3].named_modules()
    layer = {name: each for name, each in modules if "shared_expert" not in name}
    linear = {name.split(".")[-1]: m for name, m in layer.items() if isinstance(m, torch.nn.Linear)}
    wanted = {name: (m.in_features, m.out_features) for name, m in linear.items()}
    assert linear_sizes(spec) == wanted
    held = tensors(spec.dimensions, "causal")
    assert sum(math.prod(one.shape) * one.count for one in held) == parameter_count(spec)


def test_joint_matrices_are_not_cut_by_tensor_ranks() -> None:
    config = msgspec.json.encode(tiny_qwen2("01").config).decode()
    for architecture in ("glm4", "phi3"):
        spec = ModelSpec(architecture=architecture, config_json=config)
        with pytest.raises(LayoutError, match="one matrix for several projections"):
            check_tensor_parallel(spec, Parallelism(tp=2))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("capabilities", BACKENDS, ids=lambda b: f"{b.kind}-{b.backend}")
def test_a_backend_runs_a_family_or_refuses_it_by_name(
    family: Family, capabilities: BackendCapabilities
) -> None:
    # Megatron's forward deployments run the networks of its trainers.
    is_torch = capabilities.kind == "forward" and capabilities.backend == "torch"
    name = "forward" if is_torch else capabilities.backend
    spec = ModelSpec(architecture=family.model_type)
    if name in family.backends:
        check_architecture(capabilities, spec)
        return
    with pytest.raises(UnsupportedModelError, match=f"'{family.model_type}', which backend") as no:
        check_architecture(capabilities, spec)
    assert f"{family.backends[0]} (" in no.value.message


@pytest.mark.parametrize("option", ["attn_logit_softcapping", "use_bidirectional_attention"])
def test_an_option_that_no_backend_computes_is_refused(option: str) -> None:
    config = {**tiny_qwen2("01").config, option: 1}
    spec = ModelSpec(architecture="gemma3_text", config_json=msgspec.json.encode(config).decode())
    with pytest.raises(InvalidRequestError, match=f"{option}=1, which no backend computes"):
        parameter_count(spec)


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="'gpt2' is not supported"):
        parameter_count(ModelSpec(architecture="gpt2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0]}, "use a model whose layers all have experts"),
        ({"decoder_sparse_step": 2}, "use a model whose layers all have experts"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5 and the model has 4 experts"),
        ({"moe_intermediate_size": 12}, "experts' width is 12: .* a multiple of 8"),
        ({"num_experts": None}, "num_local_experts of the model's configuration is missing"),
    ],
)
def test_a_model_with_experts_that_no_backend_runs_is_refused(
    changes: dict[str, object], message: str
) -> None:
    config = {
        **tiny_qwen2("01").config,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        **changes,
    }
    text = msgspec.json.encode(config).decode()
    with pytest.raises(InvalidRequestError, match=message):
        parameter_count(ModelSpec(architecture="qwen3_moe", config_json=text))


def test_a_missing_size_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="hidden_size"):
        parameter_count(ModelSpec(architecture="qwen2"))


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": "x"},
        {"layer_types": ["full_attention", "none"]},
        {"pad_token_id": 999},
        {"id2label": 5},
        {"hidden_act": "none"},
        {"rope_parameters": 5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_configuration_that_cannot_be_built_is_refused_typed(change: dict[str, object]) -> None:
    from plexrl.worker.models import build_model

    config = tiny_qwen2("abc").config | change
    spec = ModelSpec(architecture="qwen2", config_json=msgspec.json.encode(config).decode())
    with pytest.raises(InvalidRequestError, match="cannot be built"):
        build_model(spec)


def test_a_directory_without_weights_is_refused_typed(tmp_path: Path) -> None:
    from plexrl.worker.models import build_model

    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            build_model(ModelSpec(path=str(path)))


def test_the_same_seed_makes_the_same_bits() -> None:
    from plexrl.worker.models import build_model, named_parameters

    one, same, other = (
        dict(named_parameters(build_model(tiny_qwen2("abc", seed=seed)))) for seed in (1, 1, 2)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
