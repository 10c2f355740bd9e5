"""How near to a computation in float32 the kernels of a dtype come."""

from collections.abc import Iterable

import torch

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Largest difference, relative to the largest number of the same tensor."""

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def check_near(pairs: Iterable[Pair], dtype: torch.dtype) -> None:
    """Check each tensor of a dtype against the one in float32 beside it."""
    for found, wanted in pairs:
        assert found is not None
        assert wanted is not None
        assert found.dtype == dtype
        error = (found.detach().float() - wanted.detach()).abs().max()
        assert error <= TOLERANCES[dtype] * wanted.detach().abs().max()
