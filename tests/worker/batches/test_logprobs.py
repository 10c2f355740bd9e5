"""Entropies and likeliest tokens against torch's own functions."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plexrl.worker.batches import logprobs
from plexrl.worker.batches.logprobs import entropy, likeliest


@pytest.mark.parametrize("chunk", [1, 40, 1 << 24], ids=lambda c: f"{c} elements at a time")
def test_entropy_and_its_gradient_are_those_of_torch(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn((3, 5, 11), generator=generator)
    own, plain = (logits.clone().requires_grad_(True) for _ in range(2))
    weights = torch.rand((3, 5), generator=generator)
    found = entropy(own)
    wanted = torch.distributions.Categorical(logits=plain).entropy()  # type: ignore[no-untyped-call]
    assert torch.allclose(found, wanted, atol=1e-6)
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    (wanted * weights).sum().backward()
    assert own.grad is not None
    assert plain.grad is not None
    assert torch.allclose(own.grad, plain.grad, atol=1e-6)


class AllocationSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the elements of each tensor that an operation allocates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {_storage(each) for each in (*args, *(kwargs or {}).values())}
        if isinstance(found, torch.Tensor) and _storage(found) not in given:
            self.elements.append(found.numel())
        return found


def _storage(value: Any) -> int | None:
    """Address of a tensor's memory, which its views share."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None


@pytest.mark.parametrize("shape", [(6, 5, 11), (3, 9, 11), (2, 1, 11)], ids=str)
def test_an_entropy_of_rows_without_their_last_token_copies_one_part_at_a_time(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = 55
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    view = logits[:, :-1].requires_grad_(True)
    plain = view.detach().clone().requires_grad_(True)
    with AllocationSizes() as sizes:
        found = entropy(view)
    assert max(sizes.elements) <= chunk
    with AllocationSizes() as sizes:
        (gradient,) = torch.autograd.grad(found.sum(), view)
    whole = [count for count in sizes.elements if count > chunk]
    assert whole == [view.numel()] * (view.numel() > chunk)
    assert torch.equal(found, entropy(plain))
    assert torch.equal(gradient, torch.autograd.grad(entropy(plain).sum(), plain)[0])


def test_tokens_without_probability_and_huge_logits_have_an_entropy_and_gradients() -> None:
    logits = torch.tensor([[1e30, -torch.inf, 1e30, 0.0], [-1e30, 3.0, 3.0, -torch.inf]])
    logits.requires_grad_(True)
    found = entropy(logits)
    assert torch.allclose(found, torch.full((2,), 2.0).log())
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_likeliest_tokens_are_those_of_topk_with_their_logprobs() -> None:
    logits = torch.randn((2, 3, 9), generator=torch.Generator().manual_seed(1))
    ids, values = likeliest(logits, 4)
    wanted = logits.log_softmax(-1).topk(4)
    assert torch.equal(ids, wanted.indices)
    assert torch.allclose(values, wanted.values, atol=1e-6)
