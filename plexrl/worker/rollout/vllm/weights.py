"""vLLM's parameters, laid on the arena that the weights lie in.

A parameter of vLLM whose pieces follow each other in the arena *is* that part of the arena: there
is no second copy that could be stale, and an offload takes its memory along. The few whose pieces
are kept apart by the arena's alignment stay vLLM's own and are copied at every update.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from plexrl.errors import StaleWeightsError
from plexrl.worker.rollout.vllm.placement import Piece

if TYPE_CHECKING:
    from torch import nn


class ArenaWeights:
    """Keeps vLLM's parameters equal to the arena's, and can tell."""

    def __init__(
        self, model: "nn.Module", homes: Mapping[str, torch.Tensor], pieces: Sequence[Piece]
    ) -> None:
        """`homes`: each weight's tensor in the arena; memory must be attached. Room behind the last
        piece of a padded parameter must be reserved."""
        self._model = model
        self._shared: dict[str, torch.Tensor] = {}
        self._copied: list[tuple[str, int, torch.Tensor]] = []
        parameters = dict(model.named_parameters())
        for name, group in groupby(pieces, key=lambda piece: piece.parameter):
            parts = list(group)
            parameter = parameters[name]
            joint = _joint([homes[part.name] for part in parts], parameter.data)
            if joint is None:
                self._copied += [(name, part.start, homes[part.name]) for part in parts]
            else:
                parameter.data = self._shared[name] = joint
        self.refresh()

    @property
    def bytes_copied(self) -> int:
        """Of weights that vLLM holds besides the arena."""
        return sum(home.nbytes for _, _, home in self._copied)

    def refresh(self) -> None:
        """Copy what is not shared."""
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, start, home in self._copied:
                _part(parameters[name], start, home).copy_(home)

    def check(self) -> None:
        """Raises `StaleWeightsError` where a parameter of vLLM is not the arena's, bit by bit."""
        parameters = dict(self._model.named_parameters())
        for name, home in self._shared.items():
            if parameters[name].data_ptr() != home.data_ptr():
                raise _stale(f"{name} is another tensor than the one that updates are written to")
        for name, start, home in self._copied:
            if not torch.equal(_part(parameters[name], start, home), home):
                raise _stale(f"{name} differs from the weights it was loaded from")
        for name, module in self._model.named_modules():
            computes: Any = getattr(module, "cpu_linear", None)
            if computes not in (None, torch.nn.functional.linear):
                raise _stale(f"{name} computes with a packed copy of its weight")


def _part(parameter: torch.Tensor, start: int, home: torch.Tensor) -> torch.Tensor:
    return parameter.data.view(-1)[start : start + home.numel()].view(home.shape)


def _joint(homes: Sequence[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor | None:
    """Tensors that follow each other in the arena, as one like `parameter`. None: they do not."""
    first = homes[0]
    end = first.storage_offset()
    for home in homes:
        if home.storage_offset() != end or home.dtype != parameter.dtype:
            return None
        end += home.numel()
    return first.as_strided(parameter.shape, parameter.stride())


def _stale(what: str) -> StaleWeightsError:
    return StaleWeightsError(
        f"vLLM would generate with other weights than it was given: {what}. It generates nothing "
        "until an update is right: sync weights again, or use backend 'torch'"
    )
