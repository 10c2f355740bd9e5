"""Which models a tensor-parallel layout can cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, LayoutError
from plexrl.model.architecture.cut import stage_layers
from plexrl.model.layout import check_equal_parts, check_tensor_parallel
from plexrl.model.parallelism import Parallelism
from plexrl.model.spec import ModelSpec

SIZES = {
    "vocab_size": 23,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
}


def model(**changes: Any) -> ModelSpec:
    return ModelSpec(architecture="llama", config_json=json.dumps({**SIZES, **changes}))


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_tp_may_be_whatever_divides_heads_and_key_value_heads(tp: int) -> None:
    check_tensor_parallel(model(), Parallelism(tp=tp, dp=5))


@pytest.mark.parametrize(
    ("tp", "changes", "message"),
    [
        (4, {}, "num_key_value_heads is 6: .* use 3 "),
        (12, {}, "num_key_value_heads is 6: .* use 6 "),
        (5, {}, "num_attention_heads is 12: .* use 3 "),
        (24, {"num_key_value_heads": None}, "num_attention_heads is 12: .* use 12 "),
        (6, {"vocab_size": 10}, "vocab_size is 10: the last rank would get no part"),
        (6, {"intermediate_size": 5}, "intermediate_size is 5: the last rank"),
    ],
)
def test_a_cut_that_cannot_be_is_refused_with_what_can(
    tp: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message) as refused:
        check_tensor_parallel(model(**changes), Parallelism(tp=tp))
    assert refused.value.details["field"] == "tp"


def test_tensor_ranks_of_an_engine_get_whole_experts() -> None:
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 8,
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
    }
    text = json.dumps({**SIZES, **experts})
    mixtral = ModelSpec(architecture="mixtral", config_json=text)
    for tp in (1, 2, 4):
        check_tensor_parallel(mixtral, Parallelism(tp=tp))
        check_equal_parts(mixtral, Parallelism(tp=tp))
    with pytest.raises(LayoutError, match="tp is 3 and the model has 4 experts in a layer") as no:
        check_equal_parts(mixtral, Parallelism(tp=3))
    assert no.value.details["field"] == "tp"


def test_a_configuration_without_sizes_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="is missing: it must be"):
        check_tensor_parallel(ModelSpec(architecture="llama"), Parallelism(tp=2))


@given(st.integers(1, 60), st.integers(1, 60))
def test_stages_have_all_layers_in_order_and_differ_by_one_at_most(
    layers: int, stages: int
) -> None:
    found = stage_layers(layers, stages)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    assert len(found) == stages
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_the_stages_with_the_embedding_and_the_output_layer_have_fewer_layers() -> None:
    # 94 layers on 12 stages: PlexRL Table 1, 235B.
    assert [len(stage) for stage in stage_layers(94, 12)] == [7, *[8] * 10, 7]
    assert [len(stage) for stage in stage_layers(3, 2)] == [2, 1]
