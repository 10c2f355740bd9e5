"""The engine's passes against `transformers`, by architecture."""

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import ModelSpec
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine import Engine, Generation
from plexrl.worker.rollout.engine.forward.llama import LlamaForward
from plexrl.worker.rollout.engine.forward.module import ModuleForward
from plexrl.worker.rollout.engine.forward.selection import select_forward

PROMPTS = [[3, 4, 5, 6], [7], list(range(3, 20)), [14, 15]]
COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
ROPE = {"rope_type": "default", "rope_theta": 1e3}
GEMMA3 = {
    **GROUPED,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    },
}
"""Prompts and rows are longer than the window."""
EXPERTS = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama, yarn": ("llama", {**GROUPED, "rope_parameters": YARN}),
    "llama, no groups": ("llama", {**COMMON, "num_key_value_heads": 4}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": None, "head_dim": 8}),
    "qwen2": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 16}),
    "mistral, window": ("mistral", {**GROUPED, "sliding_window": 5, "head_dim": 8}),
    "qwen2, some windows": (
        "qwen2",
        {**GROUPED, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "gemma3_text, untied, biases, capped": (
        "gemma3_text",
        {
            **GEMMA3,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "final_logit_softcapping": 0.5,
        },
    ),
    "glm4": (
        "glm4",
        {
            **GROUPED,
            "head_dim": 16,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4, no biases": ("glm4", {**GROUPED, "head_dim": 8, "attention_bias": False}),
    "phi3": ("phi3", {**GROUPED, "sliding_window": 5}),
    "phi3, part of a head": (
        "phi3",
        {
            **GROUPED,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**GROUPED, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, not normalised": ("qwen3_moe", {**GROUPED, **EXPERTS, "hidden_act": "gelu"}),
    "gpt_oss": (
        "gpt_oss",
        {
            **GROUPED,
            "head_dim": 16,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.05,
        },
    ),
    "gpt_oss, no windows, no biases, tied": (
        "gpt_oss",
        {
            **GROUPED,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 32}),
    "gpt_neox": ("gpt_neox", COMMON),
    "llama, dynamic rope": (
        "llama",
        {**GROUPED, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


def model_of(architecture: str, config: dict[str, Any]) -> Any:
    model = build_model(
        ModelSpec(
            architecture=architecture, config_json=msgspec.json.encode(config).decode(), seed=4
        )
    )
    # Initial biases are 0 and initial norms 1: a pass that leaves them out would go unseen.
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def greedy(model: nn.Module) -> Generation:
    engine = Engine(model, slots=8, sequence_tokens_max=40, block_tokens=4, step_tokens_max=9)
    made = Generation(
        name="g",
        prompts=PROMPTS,
        samples_per_prompt=1,
        sampling=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        emit=None,
        weights_seq=0,
    )
    engine.submit(made)
    while engine.has_work:
        engine.step()
    return made


@pytest.mark.parametrize("name", [*OWN, *THEIRS])
def test_greedy_tokens_and_logprobs_are_those_of_transformers(name: str) -> None:
    model = model_of(*{**OWN, **THEIRS}[name])
    own = isinstance(select_forward(model, 40), LlamaForward)
    assert own == (name in OWN)
    made = greedy(model)
    for prompt, tokens, logprobs in zip(PROMPTS, made.tokens, made.logprobs, strict=True):
        wanted = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert tokens.tolist() == wanted[0, len(prompt) :].tolist()
        with torch.no_grad():
            whole = model(input_ids=wanted).logits.log_softmax(-1)[0, :-1]
        own_logprobs = whole.gather(-1, wanted[0, 1:, None])[len(prompt) - 1 :, 0]
        assert torch.allclose(torch.from_numpy(logprobs), own_logprobs, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3_moe", "mixtral", "gpt_oss", "gemma3_text", "glm4", "phi3"]
)
def test_our_pass_and_the_models_own_agree_in_a_half_precision(name: str) -> None:
    model = model_of(*OWN[name]).to(torch.bfloat16)
    made = greedy(model)
    with torch.no_grad():
        for prompt, tokens, logprobs in zip(PROMPTS, made.tokens, made.logprobs, strict=True):
            row = torch.tensor([[*prompt, *tokens.tolist()]])
            whole = model(input_ids=row).logits.float().log_softmax(-1)[0, :-1]
            wanted = whole.gather(-1, row[0, 1:, None])[len(prompt) - 1 :, 0]
            assert torch.allclose(torch.from_numpy(logprobs), wanted, atol=0.1)


def test_a_model_that_scales_its_logits_is_refused() -> None:
    model = model_of("granite", {**GROUPED, "logits_scaling": 8.0})
    with pytest.raises(InvalidRequestError, match="'granite' the torch engine's logprobs differ"):
        Engine(model, slots=2, sequence_tokens_max=40)


def test_a_window_is_refused_where_the_models_own_decoder_runs() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = {**GROUPED, "sliding_window": 16, "rope_parameters": rope}
    model = model_of("mistral", config)
    with pytest.raises(InvalidRequestError, match="a max_sequence_tokens within the window"):
        Engine(model, slots=2, sequence_tokens_max=40)
    assert isinstance(select_forward(model_of("gpt2", THEIRS["gpt2"][1]), 40), ModuleForward)
    Engine(model, slots=2, sequence_tokens_max=16)
