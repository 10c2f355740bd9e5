"""Entropies and likeliest tokens against torch's own functions."""

import pytest
import torch

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
