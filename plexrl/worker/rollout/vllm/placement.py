"""Where vLLM puts each of a model's parameters: its own `load_weights` watched at work.

vLLM joins some parameters into one (q, k and v; gate and up) and pads others. What it does is seen
in the copies that it makes, so nothing is assumed about an architecture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A whole parameter of the model, in one of vLLM's."""

    parameter: str
    """vLLM's name."""
    start: int
    """Elements before it in vLLM's parameter, read row by row."""
    name: str
    """The model's name, as its checkpoints have it."""
    elements: int


def watch_loading(model: "nn.Module", weights: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Have vLLM's `model` load `weights`; every parameter's pieces, in vLLM's order.

    Raises:
        InvalidRequestError: some weight is not copied as it is, or a parameter not made of weights.
    """
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    copies = _Copies()
    with torch.no_grad(), copies:
        load: Any = model.load_weights
        load(weights.items())
    owners = {_memory(tensor): name for name, tensor in parameters.items()}
    sources = {_memory(tensor): name for name, tensor in weights.items()}
    pieces: dict[str, list[Piece]] = {name: [] for name in parameters}
    for into, source in copies.seen:
        owner = owners.get(_memory(into))
        if owner is None:
            continue
        name = sources.get(_memory(source), "something made of weights")
        whole = weights.get(name)
        if whole is None or not _same(source, whole, into):
            raise _unlike(f"{owner} takes part of {name}, or changes it")
        start = int(into.storage_offset() - parameters[owner].storage_offset())
        pieces[owner].append(
            Piece(parameter=owner, start=start, name=name, elements=source.numel())
        )
    _check(pieces, parameters, weights)
    return [piece for found in pieces.values() for piece in sorted(found, key=lambda p: p.start)]


def _same(source: torch.Tensor, whole: torch.Tensor, into: torch.Tensor) -> bool:
    """All of a weight goes, bit by bit and in its order, into consecutive places."""
    return (
        source.is_contiguous()
        and into.is_contiguous()
        and source.numel() == into.numel() == whole.numel()
        and source.dtype == into.dtype
    )


def _check(
    pieces: Mapping[str, Sequence[Piece]],
    parameters: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> None:
    for owner, found in pieces.items():
        end = 0
        for piece in sorted(found, key=lambda p: p.start):
            if piece.start != end:
                raise _unlike(f"{owner} has a gap, or is loaded twice, at element {end}")
            end += piece.elements
        # What may be left over pads a vocabulary.
        if not found or end > parameters[owner].numel():
            raise _unlike(f"{owner} is not filled by weights")
    placed = sorted(piece.name for found in pieces.values() for piece in found)
    if placed != sorted(weights):
        missing = sorted(set(weights) - set(placed))
        raise _unlike(f"{', '.join(missing[:3]) or 'some weight'} is loaded not at all, or twice")


def _unlike(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"vLLM keeps this model's weights in a form that cannot be updated in place: {what}: use "
        "backend 'torch'"
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own lack
    """Remembers every copy from one tensor into another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.seen.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))
