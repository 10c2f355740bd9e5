"""Finds weights that are not finite, on the rank that holds them.

A check reads all weights of the rank once. So the backend remembers that they are finite until an
operation changes them.
"""

from collections.abc import Callable, Sequence

import torch

from plexrl.errors import NonFiniteWeightsError
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.rank_agreement import on_all_ranks


def check_finite_weights(
    arena: WorkerArena, slices: Sequence[StateSlice], gather: Callable[[str], list[str]]
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
            f"parameter {name!r} has values that are infinite or not a number: look for extreme "
            "learning rates, advantages or logprobs, or load an earlier checkpoint",
            parameter=name,
        )

    on_all_ranks(gather, look)


def first_non_finite(arena: WorkerArena, slices: Sequence[StateSlice]) -> str | None:
    """Name of the first parameter, in the order of `slices`, that is not finite; None: all are."""
    pieces = [piece for piece in slices if piece.key.part == StatePart.PARAMETER]
    tensors = [view(arena, piece) for piece in pieces]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return None
    # A sum reads each value once and makes no copy; if the sum is finite, all values are. All sums
    # are copied from the device together.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in floats])
    if bool(torch.isfinite(sums).all()):
        return None
    for piece, tensor in zip(pieces, tensors, strict=True):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return piece.key.name
    return None
