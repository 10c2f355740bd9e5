"""vLLM's parameters as views of the arena that holds the weights.

`watch_loading` records where vLLM puts each weight: vLLM joins some parameters (q, k and v; gate
and up) and pads others. It watches the copies of vLLM's own `load_weights`, so it assumes nothing
about an architecture.

If a parameter's pieces are contiguous in the arena, `ArenaWeights` makes the parameter a view of
them: no second copy can be stale, and an offload frees its memory. The few parameters whose pieces
are separated by the arena's alignment stay vLLM's own, and are copied at every update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plexrl.errors import InvalidRequestError, StaleWeightsError
from plexrl.worker.state.arena_tensors import ShardBox, joined, whole_box

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """A box of a weight of the model, as part of one of vLLM's parameters."""

    parameter: str
    """vLLM's name of the parameter."""
    start: int
    """Offset in vLLM's parameter, in elements."""
    name: str
    """The model's name of the weight, as in its checkpoints."""
    box: ShardBox
    """The whole weight, or this rank's part of it."""


class ArenaWeights:
    """Keeps vLLM's parameters equal to the weights in the arena, and checks that they are."""

    def __init__(
        self,
        model: "nn.Module",
        homes: Mapping[str, torch.Tensor],
        pieces: Sequence[WeightPiece],
    ) -> None:
        """`homes`: each weight's tensor in the arena, whose memory must be attached. Elements must
        be reserved behind the last piece of a padded parameter."""
        self._model = model
        self._shared: dict[str, torch.Tensor] = {}
        self._copied: list[tuple[str, int, torch.Tensor]] = []
        parameters = dict(model.named_parameters())
        for name, group in groupby(pieces, key=lambda piece: piece.parameter):
            parts = list(group)
            parameter = parameters[name]
            joint = _joint([homes[part.name] for part in parts], parameter.data)
            if joint is None:
                if not parameter.untyped_storage().nbytes():
                    parameter.data = torch.empty_like(parameter.data)
                self._copied += [(name, part.start, homes[part.name]) for part in parts]
            else:
                parameter.data = self._shared[name] = joint
        self.refresh()

    @property
    def bytes_copied(self) -> int:
        """Bytes of weights that vLLM holds in addition to the arena."""
        return sum(home.nbytes for _, _, home in self._copied)

    def refresh(self) -> None:
        """Copy the weights that are not shared."""
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, start, home in self._copied:
                _part(parameters[name], start, home).copy_(home)

    def check(self) -> None:
        """Raises `StaleWeightsError` if a parameter of vLLM differs from the arena, bit by bit."""
        parameters = dict(self._model.named_parameters())
        for name, home in self._shared.items():
            if parameters[name].data_ptr() != home.data_ptr():
                raise _stale(f"{name} is not the tensor that updates write to")
        for name, start, home in self._copied:
            if not torch.equal(_part(parameters[name], start, home), home):
                raise _stale(f"{name} differs from the weights it was loaded from")
        for name, module in self._model.named_modules():
            computes: Any = getattr(module, "cpu_linear", None)
            if computes not in (None, torch.nn.functional.linear):
                raise _stale(f"{name} computes with a packed copy of its weight")


def watch_loading(
    model: "nn.Module", weights: Mapping[str, torch.Tensor], *, divides: bool = False
) -> list[WeightPiece]:
    """Have vLLM's `model` load `weights`, whose values do not matter; returns every parameter's
    pieces, in vLLM's order. `divides`: the model is one rank's part.

    Raises:
        InvalidRequestError: vLLM changes a weight while it copies it, or a parameter is not made of
            weights.
    """
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    copies = _Copies()
    with torch.no_grad(), copies:
        load: Any = model.load_weights
        load(weights.items())
    owners = {_memory(tensor): name for name, tensor in parameters.items()}
    sources = {_memory(tensor): name for name, tensor in weights.items()}
    pieces: dict[str, list[WeightPiece]] = {name: [] for name in parameters}
    for into, source in copies.recorded:
        owner = owners.get(_memory(into))
        if owner is None:
            continue
        name = sources.get(_memory(source), "a tensor computed from weights")
        whole = weights.get(name)
        box = None if whole is None else _copied_box(source, whole, into)
        if box is None or not (divides or box.shape == box.global_shape):
            raise _cannot_share(f"{owner} takes part of {name}, or changes it")
        start = int(into.storage_offset() - parameters[owner].storage_offset())
        pieces[owner].append(WeightPiece(parameter=owner, start=start, name=name, box=box))
    _check_cover(pieces, parameters, weights)
    return [piece for found in pieces.values() for piece in sorted(found, key=lambda p: p.start)]


def free_memory(model: "nn.Module") -> None:
    """Free the parameters' memory: `ArenaWeights` gives them that of the arena."""
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)


def _copied_box(source: torch.Tensor, whole: torch.Tensor, into: torch.Tensor) -> ShardBox | None:
    """The box of a contiguous weight that is copied bit by bit, in order, to contiguous memory;
    None: something else is done."""
    same = source.numel() == into.numel() and source.dtype == into.dtype
    if not same or not into.is_contiguous():
        return None
    if source.is_contiguous() and source.numel() == whole.numel():
        return whole_box(tuple(whole.shape))
    if source.stride() != whole.stride():
        return None
    rest, offset = int(source.storage_offset() - whole.storage_offset()), []
    for stride in whole.stride():
        first, rest = divmod(rest, stride)
        offset.append(first)
    return ShardBox(
        global_shape=tuple(whole.shape), offset=tuple(offset), shape=tuple(source.shape)
    )


def _check_cover(
    pieces: Mapping[str, Sequence[WeightPiece]],
    parameters: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
) -> None:
    for owner, found in pieces.items():
        end = 0
        for piece in sorted(found, key=lambda p: p.start):
            if piece.start != end:
                raise _cannot_share(f"{owner} has a gap, or is loaded twice, at element {end}")
            end += piece.box.elements
        # The rest of a parameter may be padding of the vocabulary.
        if not found or end > parameters[owner].numel():
            raise _cannot_share(f"{owner} is not filled by weights")
    placed = sorted(piece.name for found in pieces.values() for piece in found)
    if placed != sorted(weights):
        missing = sorted(set(weights) - set(placed))
        names = ", ".join(missing[:3]) or "some weight"
        raise _cannot_share(f"{names} is not loaded, or loaded twice")


def _cannot_share(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"vLLM keeps this model's weights in a form that cannot be updated in place: {what}: use "
        "backend 'torch'"
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotation
    """Records every copy from one tensor into another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self.recorded: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.recorded.append((args[0], args[1]))
        return func(*args, **(kwargs or {}))


def _part(parameter: torch.Tensor, start: int, home: torch.Tensor) -> torch.Tensor:
    return parameter.data.view(-1)[start : start + home.numel()].view(home.shape)


def _joint(homes: Sequence[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | None:
    """One view over adjacent tensors of the arena, shaped as `parameter`. None: not adjacent."""
    if joined(homes) is None or any(home.dtype != parameter.dtype for home in homes):
        return None
    # Padding behind the last tensor is part of the view.
    return homes[0].as_strided(parameter.shape, parameter.stride())


def _stale(what: str) -> StaleWeightsError:
    return StaleWeightsError(
        f"vLLM would generate with other weights than the last update's: {what}. It generates "
        "nothing until an update succeeds: sync weights again, or use backend 'torch'"
    )
