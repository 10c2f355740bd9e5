"""Finds weights that are not finite, on the rank that holds them.

A check reads all weights of the rank once. So the backend remembers that they are finite until an
operation changes them.
"""

from collections.abc import Callable, Sequence

import torch

from plexrl.errors import NonFiniteWeightsError
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.worker.state.arena_tensors import AnyArena, view
from plexrl.worker.state.rank_agreement import on_all_ranks

WEIGHT_MAX = 1e6
"""Above this a model's activations overflow: the three products of an MLP, squared by the next
norm, leave float32, the norm makes them 0, and all tokens look equally likely."""


def check_finite_weights(
    arena: AnyArena, slices: Sequence[StateSlice], gather: Callable[[str], list[str]]
) -> None:
    """Check the parameters of all ranks; every rank takes part.

    Raises:
        NonFiniteWeightsError: on every rank, naming the first parameter that is not finite.
    """

    def look() -> str:
        name = first_non_finite(arena, slices)
        if name is None:
            return ""
        raise NonFiniteWeightsError(
            f"parameter {name!r} has values that are infinite, not a number or above "
            f"{WEIGHT_MAX:g}: the training has diverged; look for extreme "
            "learning rates, advantages or logprobs, or load an earlier checkpoint",
            parameter=name,
        )

    on_all_ranks(gather, look)


def first_non_finite(arena: AnyArena, slices: Sequence[StateSlice]) -> str | None:
    """Name of the first parameter, in the order of `slices`, that a model cannot compute with.
    None: it can with all."""
    pieces = [piece for piece in slices if piece.key.part == StatePart.PARAMETER]
    tensors = [view(arena, piece) for piece in pieces]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return None
    # Reads each value once and makes no copy. All results are copied from the device together; NaN
    # is not less than the bound.
    usable = torch.stack([_largest(tensor) for tensor in floats]) <= WEIGHT_MAX
    if bool(usable.all()):
        return None
    for piece, tensor in zip(pieces, tensors, strict=True):
        if tensor.is_floating_point() and not bool(_largest(tensor) <= WEIGHT_MAX):
            return piece.key.name
    return None


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float32)
    if tensor.element_size() == 1:
        # Norms of float8 do not exist, and no value of it is too large.
        return tensor.sum(dtype=torch.float32).mul(0)
    largest: torch.Tensor = torch.linalg.vector_norm(tensor, ord=torch.inf)
    return largest.float()
