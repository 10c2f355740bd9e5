"""Weights that are not finite are found, by name, and nothing else is taken for them."""

import json

import pytest
import torch

from plexrl.errors import NonFiniteWeightsError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import StateKey, StatePart
from plexrl.worker.state.arena_tensors import ArenaLayout, view, whole_box
from plexrl.worker.state.contents.finite_weights import check_finite_weights, first_non_finite


def arena_with(**tensors: torch.Tensor) -> tuple[Arena, ArenaLayout]:
    """Parameters by name; what begins with `moment` is optimizer state."""
    layout = ArenaLayout()
    for name, tensor in tensors.items():
        part = StatePart.OPTIMIZER if name.startswith("moment") else StatePart.PARAMETER
        shape = tuple(tensor.shape)
        dtype = "BF16" if tensor.dtype == torch.bfloat16 else "F32"
        layout.add(StateKey(part=part, name=name), whole_box(shape), dtype)
    arena = Arena(layout.nbytes)
    for piece, tensor in zip(layout.slices, tensors.values(), strict=True):
        view(arena, piece).copy_(tensor)
    return arena, layout


GOOD = torch.arange(6.0).view(2, 3)
LARGE = torch.full((4, 4), 1e6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_parameter_that_is_not_finite_is_named(bad: float, dtype: torch.dtype) -> None:
    spoilt = torch.zeros(5, dtype=dtype)
    spoilt[3] = bad
    arena, layout = arena_with(good=GOOD, spoilt=spoilt, later=spoilt)
    assert first_non_finite(arena, layout.slices) == "spoilt"
    with pytest.raises(NonFiniteWeightsError, match="parameter 'spoilt'") as caught:
        check_finite_weights(arena, layout.slices, lambda value: [value])
    assert caught.value.details == {"parameter": "spoilt"}


def test_weights_whose_activations_overflow_are_refused_too() -> None:
    arena, layout = arena_with(good=GOOD, large=LARGE, diverged=-1.1 * LARGE)
    with pytest.raises(NonFiniteWeightsError, match=r"parameter 'diverged' .* above 1e\+06"):
        check_finite_weights(arena, layout.slices, lambda value: [value])


def test_large_weights_and_other_parts_are_left_alone() -> None:
    moment = torch.full((2,), float("nan"))
    arena, layout = arena_with(good=GOOD, large=LARGE, empty=torch.zeros(0), moment=moment)
    assert first_non_finite(arena, layout.slices) is None
    check_finite_weights(arena, layout.slices, lambda value: [value])


def test_a_rank_whose_own_weights_are_finite_learns_of_anothers() -> None:
    arena, layout = arena_with(good=GOOD)
    other = NonFiniteWeightsError("parameter 'far' is nan", parameter="far")

    def gather(value: str) -> list[str]:
        return [value, json.dumps({"error": other.to_wire()})]

    with pytest.raises(NonFiniteWeightsError, match="far"):
        check_finite_weights(arena, layout.slices, gather)
