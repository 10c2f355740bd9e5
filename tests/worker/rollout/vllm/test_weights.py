"""What the adapter makes of a model's own way to load weights, without vLLM."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from plexrl.errors import InvalidRequestError, StaleWeightsError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import StateKey, StatePart
from plexrl.worker.rollout.vllm.cache_memory import CacheMemory
from plexrl.worker.rollout.vllm.probe import check_logprobs, probe_tokens
from plexrl.worker.rollout.vllm.weights import (
    ArenaWeights,
    WeightPiece,
    free_memory,
    watch_loading,
)
from plexrl.worker.state.arena_tensors import ArenaLayout, ShardBox, view, whole_box

Loader = Callable[[Any, dict[str, torch.Tensor]], None]
WIDE = 16
"""Elements that end where the arena's next tensor begins."""


class Joined(nn.Module):
    """Loads `a` and `b` into one parameter, and `words` into a longer one, as vLLM's models do."""

    def __init__(self, loader: Loader | None = None, inputs: int = WIDE) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.zeros(8, WIDE), requires_grad=False)
        self.ab = nn.Parameter(torch.zeros(5, inputs), requires_grad=False)
        self._loader = loader

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = dict(weights)
        if self._loader is not None:
            self._loader(self, named)
            return
        self.ab.data.narrow(0, 3, 2).copy_(named["b"])
        self.ab.data.narrow(0, 0, 3).copy_(named["a"])
        self.words.data[:6].copy_(named["words"])
        self.words.data[6:].fill_(0)


def some_weights(inputs: int = WIDE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"a": (3, inputs), "b": (2, inputs), "words": (6, WIDE)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def in_arena(
    weights: dict[str, torch.Tensor], pieces: list[WeightPiece]
) -> dict[str, torch.Tensor]:
    layout = ArenaLayout()
    for piece in pieces:
        shape = tuple(weights[piece.name].shape)
        layout.add(
            StateKey(part=StatePart.PARAMETER, name=piece.name),
            replace(whole_box(shape), reserve=8 * WIDE if piece.name == "words" else 0),
        )
    arena = Arena(layout.nbytes)
    homes = {piece.key.name: view(arena, piece) for piece in layout.slices}
    for name, home in homes.items():
        home.copy_(weights[name])
    return homes


def test_the_copies_of_a_load_say_where_each_weight_goes() -> None:
    pieces = watch_loading(Joined(), some_weights())
    assert [(p.parameter, p.start, p.name, p.box) for p in pieces] == [
        ("words", 0, "words", whole_box((6, WIDE))),
        ("ab", 0, "a", whole_box((3, WIDE))),
        ("ab", 3 * WIDE, "b", whole_box((2, WIDE))),
    ]


def _second_of_two(model: Any, named: dict[str, torch.Tensor]) -> None:
    """`a` is divided by rows, `b` by columns, and `words` has no row left for this rank."""
    model.ab.data[:1].copy_(named["a"].narrow(0, 2, 1))
    model.ab.data.view(-1)[WIDE : 2 * WIDE].view(2, WIDE // 2).copy_(named["b"].chunk(2, dim=1)[1])
    model.words.data[:0].copy_(named["words"].narrow(0, 6, 0))


def test_the_copies_of_a_divided_model_say_which_box_a_rank_has() -> None:
    pieces = watch_loading(Joined(_second_of_two), some_weights(), divides=True)
    assert [(p.parameter, p.start, p.name, p.box) for p in pieces] == [
        ("words", 0, "words", ShardBox(global_shape=(6, WIDE), offset=(6, 0), shape=(0, WIDE))),
        ("ab", 0, "a", ShardBox(global_shape=(3, WIDE), offset=(2, 0), shape=(1, WIDE))),
        (
            "ab",
            WIDE,
            "b",
            ShardBox(global_shape=(2, WIDE), offset=(0, WIDE // 2), shape=(2, WIDE // 2)),
        ),
    ]


@pytest.mark.parametrize("inputs", [WIDE, WIDE - 1])
def test_parameters_whose_memory_was_freed_get_the_weights_again(inputs: int) -> None:
    """With rows of 15 elements `a` and `b` are not next to each other in the arena."""
    model, weights = Joined(inputs=inputs), some_weights(inputs)
    pieces = watch_loading(model, weights)
    free_memory(model)
    assert not any(each.untyped_storage().nbytes() for each in model.parameters())
    arena = ArenaWeights(model, in_arena(weights, pieces), pieces)
    arena.check()
    assert (arena.bytes_copied == 0) == (inputs == WIDE)
    assert torch.equal(model.ab.data, torch.cat([weights["a"], weights["b"]]))
    assert torch.equal(model.words.data[:6], weights["words"])


def test_a_released_cache_holds_nothing_and_comes_back_zeroed() -> None:
    layers = [torch.full((4, 8), 7.0) for _ in range(2)]
    cache = CacheMemory(SimpleNamespace(kv_caches=[*layers, layers[0]]))
    assert cache.held_bytes == cache.nbytes == 2 * 4 * 8 * 4
    cache.release()
    assert cache.held_bytes == 0
    cache.ensure()
    assert cache.held_bytes == cache.nbytes
    assert not any(layer.any() for layer in layers)


def test_joined_parameters_become_the_arena_itself() -> None:
    model, weights = Joined(), some_weights()
    pieces = watch_loading(model, weights)
    homes = in_arena(weights, pieces)
    arena = ArenaWeights(model, homes, pieces)
    assert arena.bytes_copied == 0
    homes["b"].fill_(7)
    homes["words"].fill_(8)
    arena.check()
    assert torch.equal(model.ab, torch.cat([weights["a"], torch.full((2, WIDE), 7.0)]))
    assert torch.equal(model.words[:6], torch.full((6, WIDE), 8.0))


def test_what_the_arena_keeps_apart_is_copied_at_every_update() -> None:
    model, weights = Joined(inputs=3), some_weights(inputs=3)
    pieces = watch_loading(model, weights)
    homes = in_arena(weights, pieces)
    arena = ArenaWeights(model, homes, pieces)
    assert arena.bytes_copied == 4 * 15
    homes["b"].fill_(7)
    with pytest.raises(StaleWeightsError, match="ab differs from the weights"):
        arena.check()
    arena.refresh()
    arena.check()
    assert torch.equal(model.ab, torch.cat([weights["a"], torch.full((2, 3), 7.0)]))


def _turned(model: Any, named: dict[str, torch.Tensor]) -> None:
    model.ab.data.view(WIDE, 5)[:, :3].copy_(named["a"].t())


def _scaled(model: Any, named: dict[str, torch.Tensor]) -> None:
    model.words.data[:6].copy_(named["words"] * 2)


def _halved(model: Any, named: dict[str, torch.Tensor]) -> None:
    model.ab.data[:1].copy_(named["a"][:1])


def _forgetful(model: Any, named: dict[str, torch.Tensor]) -> None:
    model.words.data[:6].copy_(named["words"])
    model.ab.data[:3].copy_(named["a"])


def _gap(model: Any, named: dict[str, torch.Tensor]) -> None:
    model.words.data[1:7].copy_(named["words"])
    model.ab.data[:3].copy_(named["a"])
    model.ab.data[3:].copy_(named["b"])


def _unfilled(model: Any, named: dict[str, torch.Tensor]) -> None:
    model.words.data[:6].copy_(named["words"])


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (_turned, "ab takes part of a, or changes it"),
        (_scaled, "words takes part of a tensor computed from weights"),
        (_halved, "ab takes part of a"),
        (_forgetful, "b is not loaded"),
        (_gap, "words has a gap"),
        (_unfilled, "ab is not filled"),
    ],
)
def test_a_model_that_changes_its_weights_is_refused(loader: Loader, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        watch_loading(Joined(loader), some_weights())


def test_a_layer_that_computes_with_a_packed_copy_is_refused() -> None:
    model, weights = Joined(), some_weights()
    pieces = watch_loading(model, weights)
    arena = ArenaWeights(model, in_arena(weights, pieces), pieces)
    layer: Any = nn.Module()
    layer.cpu_linear = torch.nn.functional.linear
    model.add_module("head", layer)
    arena.check()
    layer.cpu_linear = torch.nn.functional.bilinear
    with pytest.raises(StaleWeightsError, match="head computes with a packed copy"):
        arena.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_may_be_off_by_rounding_and_no_more(dtype: torch.dtype) -> None:
    wanted = torch.tensor([-0.1, -3.0, -10.0])
    allowed = {torch.float32: 2e-3, torch.bfloat16: 0.42}[dtype]
    check_logprobs(wanted + 0.99 * allowed, wanted, dtype)
    for wrong in (wanted - 1.01 * allowed, wanted * torch.nan):
        with pytest.raises(StaleWeightsError, match="logprobs differ by up to"):
            check_logprobs(wrong, wanted, dtype)


def test_a_probe_leaves_room_for_the_token_it_draws() -> None:
    assert len(probe_tokens(22, 512)) == 16
    assert len(probe_tokens(22, 9)) == 8
    assert all(0 <= token < 22 for token in probe_tokens(22, 512))
