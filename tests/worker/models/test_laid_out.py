"""A model that is laid out has the bits, buffers and results of the same model built whole."""

from pathlib import Path
from typing import Any

import pytest
import torch

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import ModelSpec, tiny_qwen2
from plexrl.worker.models import build_model, lay_out_model, named_parameters
from plexrl.worker.models.initial_draws import InitialDraws
from plexrl.worker.models.weight_files import PublishedWeights
from tests.worker.training.cases import (
    BIASED,
    GEMMA3,
    GLM4,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    NARROW,
    PHI3,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
)

REWARD = tiny_qwen2("0123456789", seed=2, hidden=32, head="reward")
CRITIC = tiny_qwen2("0123456789", seed=2, hidden=32, head="value")
MODELS = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "llama": LLAMA,
    "biased": BIASED,
    "gemma3_text": GEMMA3,
    "glm4": GLM4,
    "phi3": PHI3,
    "gpt_oss": GPT_OSS,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "narrow": NARROW,
    "reward": REWARD,
}


def assert_same(spec: ModelSpec) -> None:
    whole: Any = build_model(spec)
    laid_out = lay_out_model(spec)
    if spec.path is not None:
        assert isinstance(laid_out._weights, PublishedWeights), "the whole model was read"
    wanted, found = dict(named_parameters(whole)), dict(named_parameters(laid_out.model))
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].is_meta
        # The boxes of ranks that cut rows, experts, or the halves of an expert's projections.
        last = tuple(slice(extent // 2, extent) for extent in value.shape)
        inner = tuple(slice(extent // 4, extent - 1) for extent in value.shape)
        for box in (last, inner, tuple(slice(None) for _ in value.shape)):
            assert torch.equal(laid_out.read(name, box), value.data[box]), name
    buffers = dict(whole.named_buffers())
    for name, buffer in laid_out.model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    assert laid_out.model.config.to_dict() == whole.config.to_dict()
    if spec.head == "causal":
        generation = whole.generation_config.to_dict()
        assert laid_out.model.generation_config.to_dict() == generation
    assert not laid_out.model.training


@pytest.mark.parametrize("name", MODELS)
def test_drawn_weights_are_those_of_the_whole_model(name: str) -> None:
    state = torch.get_rng_state()
    assert_same(MODELS[name])
    assert torch.equal(torch.get_rng_state(), state), "the global random state has changed"


def test_a_weight_that_was_copied_from_a_view_is_not_drawn_alone() -> None:
    with InitialDraws() as draws:
        source, copy, transposed = (torch.empty(3, 3, device="meta") for _ in range(3))
        source.normal_()
        copy.copy_(source)
        transposed.copy_(source.T)
    assert torch.equal(draws.draw(copy), draws.draw(source))
    assert draws.knows(copy)
    assert not draws.knows(transposed)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard", ["20KB", "1GB"])
def test_weights_from_files_are_those_of_the_whole_model(
    name: str, shard: str, tmp_path: Path
) -> None:
    model: Any = build_model(MODELS[name])
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size=shard)
    assert_same(ModelSpec(path=str(tmp_path), head=MODELS[name].head))


def test_a_critic_of_a_language_model_begins_with_a_head_of_zeros(tmp_path: Path) -> None:
    model: Any = build_model(QWEN2)
    model.save_pretrained(tmp_path)
    spec = ModelSpec(path=str(tmp_path), head="value")
    assert_same(spec)
    laid_out = lay_out_model(spec)
    assert not laid_out.read("score.weight", (slice(None), slice(1, None))).any()
    assert laid_out.read("model.norm.weight", (slice(None),)).all()


def test_a_directory_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model: Any = build_model(QWEN2)
    model.save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match="lacks 1 of the model's weights"):
        lay_out_model(ModelSpec(path=str(tmp_path), head="reward"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match="cannot be built"):
        lay_out_model(ModelSpec(path=str(tmp_path)))


def test_a_critic_is_no_language_model_though_no_weight_is_missing(tmp_path: Path) -> None:
    model: Any = build_model(CRITIC)
    assert model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    for opened in (build_model, lay_out_model):
        with pytest.raises(InvalidRequestError, match=r'critic.*head="value"'):
            opened(ModelSpec(path=str(tmp_path)))
        opened(ModelSpec(path=str(tmp_path), head="value"))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3_moe", "mixtral", "gemma3_text"])
def test_a_streamed_model_computes_as_the_whole_one(name: str, at_once: bool) -> None:
    whole: Any = build_model(MODELS[name])
    laid_out = lay_out_model(MODELS[name])
    tokens = torch.arange(7)[None]
    with torch.inference_mode():
        wanted = whole(input_ids=tokens, use_cache=False).logits
        with laid_out.streamed(at_once=at_once):
            found = laid_out.model(input_ids=tokens, use_cache=False).logits
    assert torch.equal(found, wanted)
    assert all(parameter.is_meta for parameter in laid_out.model.parameters())


def test_replaced_parameters_are_used_wherever_the_model_uses_them() -> None:
    whole: Any = build_model(QWEN2)
    laid_out = lay_out_model(QWEN2)
    values = {name: value.data.clone() for name, value in named_parameters(whole)}
    laid_out.replace_parameters(values)
    model: Any = laid_out.model
    assert model.lm_head.weight is model.model.embed_tokens.weight, "they are tied"
    assert model.lm_head.weight.data_ptr() == values["model.embed_tokens.weight"].data_ptr()
    tokens = torch.arange(7)[None]
    with torch.inference_mode():
        wanted = whole(input_ids=tokens, use_cache=False).logits
        assert torch.equal(model(input_ids=tokens, use_cache=False).logits, wanted)
