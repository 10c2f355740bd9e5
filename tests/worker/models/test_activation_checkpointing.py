"""Activation checkpointing keeps less and changes no bit."""

from typing import Any

import torch

from plexrl.worker.models import build_model
from plexrl.worker.models.activation_checkpointing import checkpoint_activations
from tests.worker.training.cases import QWEN2

TOKENS = torch.arange(64).view(2, 32) % 20 + 3


def backward(model: Any) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept for the backward pass, and the gradients."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=TOKENS, use_cache=False).logits.square().mean()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    return sum(nbytes for place, nbytes in kept.items() if place not in weights), gradients


def test_less_is_kept_and_gradients_are_the_same_bits() -> None:
    plain, frugal = build_model(QWEN2), build_model(QWEN2)
    layers: Any = frugal.model.layers  # type: ignore[union-attr]
    checkpoint_activations(layers)
    assert dict(frugal.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    (kept, wanted), (less, found) = backward(plain), backward(frugal)
    assert 3 * less < kept
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
