"""Weights that are not finite are found on the worker that holds them.

Each rank looks at its own slices. A look reads all of them once, so the backend remembers that they
were finite until something changes them.
"""

from collections.abc import Callable, Sequence

import torch

from plexrl.errors import NonFiniteWeightsError
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.worker.state.arena_tensors import view
from plexrl.worker.state.checkpoint import agree


def check_finite_weights(
    arena: WorkerArena, slices: Sequence[StateSlice], gather: Callable[[str], list[str]]
) -> None:
    """Look at the parameters of all ranks; every rank takes part.

    Raises:
        NonFiniteWeightsError: on every rank alike, naming the first parameter that is not finite.
    """

    def look() -> str:
        name = first_non_finite(arena, slices)
        if name is None:
            return ""
        raise NonFiniteWeightsError(
            f"parameter {name!r} has values that are infinite or not a number: look for extreme "
            "learning rates, advantages or logprobs, or load a checkpoint of before",
            parameter=name,
        )

    agree(gather, look)


def first_non_finite(arena: WorkerArena, slices: Sequence[StateSlice]) -> str | None:
    """The name of the first parameter, in the order of `slices`, that is not finite; None: all
    are."""
    pieces = [piece for piece in slices if piece.key.part == StatePart.PARAMETER]
    tensors = [view(arena, piece) for piece in pieces]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return None
    # A sum reads each value once and makes no copy; if it is finite, so are its summands. All sums
    # come from the device together.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in floats])
    if bool(torch.isfinite(sums).all()):
        return None
    for piece, tensor in zip(pieces, tensors, strict=True):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return piece.key.name
    return None
