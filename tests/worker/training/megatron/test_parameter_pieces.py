"""Which boxes of a Hugging Face model each Megatron rank holds, and how flat ranges cut them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.architecture.dimensions import Dimensions
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.layout import check_cut, megatron_dimensions
from plexrl.model.parallelism import Parallelism
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.process.backend_factory import make_backend
from plexrl.worker.state.arena_tensors import ParameterPiece
from plexrl.worker.training.megatron.parameter_pieces import cut, pieces_by_parameter
from tests.worker.training.cases import CRITIC, LLAMA, QWEN2, QWEN3, resized

MODELS = {
    "qwen2": QWEN2,
    "llama": LLAMA,
    "critic": CRITIC,
    "qwen3": QWEN3,
    "qwen3_moe": resized(
        QWEN2,
        "qwen3_moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
}
DENSE = Dimensions(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp=256,
    vocabulary=23,
    experts=0,
    experts_per_token=0,
    normalizes_top_k=False,
    has_qkv_bias=True,
    has_qk_norm=False,
    is_tied=True,
    norm_eps=1e-6,
)


def box(piece: ParameterPiece) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(piece.offset, piece.shape, strict=True))


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    ends=st.tuples(st.integers(0, 140), st.integers(0, 140)),
    before=st.integers(0, 20),
)
def test_a_cut_is_the_flat_range_it_was_asked_for(
    shape: tuple[int, ...], ends: tuple[int, int], before: int
) -> None:
    origin = tuple(range(1, len(shape) + 1))
    whole_shape = tuple(a + n + 2 for a, n in zip(origin, shape, strict=True))
    piece = ParameterPiece(
        name="w", global_shape=whole_shape, offset=origin, shape=shape, start=before
    )
    numbered = np.arange(int(np.prod(whole_shape))).reshape(whole_shape)
    flat = numbered[box(piece)].ravel()
    first, last = min(ends), max(ends)
    found = cut([piece], first, last)
    wanted = flat[max(first - before, 0) : max(last - before, 0)]
    parts = [numbered[box(each)].ravel() for each in found]
    assert np.array_equal(np.concatenate([*parts, flat[:0]]), wanted)
    assert len(found) <= 2 * len(shape) - 1
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    assert [each.start for each in found] == [max(first, before) + int(n) for n in starts]


LAYOUTS = (
    Parallelism(),
    Parallelism(tp=2),
    Parallelism(pp=2),
    Parallelism(dp=2, tp=2, pp=2),
    Parallelism(dp=2, ep=2),
    Parallelism(dp=4, ep=4, pp=2),
    Parallelism(tp=2, cp=2, ep=2, pp=2),
    Parallelism(dp=2, tp=2, ep=4),
)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}-{layout.describe()}")
        for name in MODELS
        for layout in LAYOUTS
    ],
)
def test_the_ranks_together_hold_every_element_equally_often(
    name: str, layout: Parallelism
) -> None:
    model = build_model(MODELS[name])
    head = MODELS[name].head
    sizes = megatron_dimensions(model.config.to_dict())  # type: ignore[operator, union-attr]
    if head == "value":
        sizes = replace(sizes, is_tied=False)
    held = {key: np.zeros(p.shape, dtype=np.int64) for key, p in named_parameters(model)}
    sharing = replace(layout, ep=layout.ep if sizes.experts else 1)
    for rank in range(layout.world_size):
        places = sharing.coordinates(rank)
        for pieces in pieces_by_parameter(sizes, sharing, places, head).values():
            elements = 0
            for piece in pieces:
                assert piece.global_shape == held[piece.name].shape
                assert piece.start == elements, "pieces lie end to end"
                elements += piece.elements
                held[piece.name][box(piece)] += 1
    for key, counts in held.items():
        assert counts.min() == counts.max() > 0, key
        embedding = key == "model.embed_tokens.weight" and sizes.is_tied
        is_whole = "norm" in key or key == "score.weight" or key.endswith("mlp.gate.weight")
        copies = layout.dp * layout.cp * (1 + (embedding and layout.pp > 1))
        copies *= layout.tp if is_whole else 1
        if ".experts." in key:
            copies = sharing.expert_dp
        assert counts.max() == copies, key


@pytest.mark.parametrize(
    ("layout", "changes", "field"),
    [
        (Parallelism(tp=3), {}, "tp"),
        (Parallelism(tp=4), {}, "tp"),
        (Parallelism(pp=3), {}, "pp"),
        (Parallelism(tp=2, ep=2), {}, "ep"),
        (Parallelism(dp=2, ep=2), {}, "ep"),
        (Parallelism(dp=3, ep=3), {"experts": 4}, "ep"),
        (Parallelism(), {"head_dim": 8}, "tp"),
    ],
)
def test_a_layout_that_cannot_cut_the_model_is_refused(
    layout: Parallelism, changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(LayoutError) as refused:
        check_cut(replace(DENSE, **changes), layout)
    assert refused.value.details["field"] == field


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gpt2"},
        {"model_type": "mistral", "sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"hidden_act": "gelu"},
        {"model_type": "llama", "attention_bias": True},
    ],
)
def test_a_model_that_megatron_would_run_otherwise_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match="the megatron backend"):
        megatron_dimensions({"model_type": "qwen2", **QWEN2.config, **changes})


def test_a_sliding_window_that_is_not_used_does_not_matter() -> None:
    megatron_dimensions({"model_type": "qwen2", **QWEN2.config, "sliding_window": 4096})


def test_without_megatron_core_the_backend_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    spec = DeploymentSpec(model=QWEN2, kind="train", backend="megatron", workers=1)
    with pytest.raises(InvalidRequestError, match=r"pip install 'plexrl\[megatron\]'"):
        make_backend(spec, 0, 1, tmp_path)
