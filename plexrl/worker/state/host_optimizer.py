"""AdamW on the CPU, with its moments in the host tier (ZeRO-Offload).

The kernel is torch's fused one, unless another is given. It is elementwise, so stepping chunk by
chunk gives the bits of a step over everything at once. Against the fused kernel of a GPU each
step's change of a parameter differs by rounding only: a relative 1e-6 of it.

The first step after a version was made or loaded copies: it reads the moments from the version,
which stays as it is, and writes them to memory newly borrowed, a chunk that stays in cache at a
time. The steps after it are in place.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch

from plexrl.statemanager.client.host_arena import HostArena
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.host_transfer import Chunk, Run, chunks_on_cpu

FLOAT_BYTES = 4

AdamKernel = Callable[[AdamParams, torch.Tensor, Chunk, torch.Tensor, torch.Tensor], None]
"""Steps a chunk and its first and second moments, all in place; the second argument is the count of
steps, this one among them, float32 `[]`."""


def adam_of_torch(
    params: AdamParams,
    count: torch.Tensor,
    chunk: Chunk,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
) -> None:
    """An `AdamKernel`: torch's fused AdamW."""
    torch._fused_adamw_(
        [chunk.parameter],
        [chunk.gradient],
        [first_moment],
        [second_moment],
        [],
        [count],
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )


class HostAdamW:
    """Steps one rank's parameters."""

    def __init__(
        self,
        arena: HostArena,
        runs: Sequence[Run],
        *,
        moments: tuple[int, int],
        step: int,
        kernel: AdamKernel = adam_of_torch,
    ) -> None:
        """`moments` and `step` are where in the arena, in elements, the first and second moments
        and the count of steps lie; all float32."""
        self._arena = arena
        self._runs = runs
        self._moments = moments
        self._step = step
        self._kernel = kernel

    def step(self, params: AdamParams, gradient_factor: float = 1.0) -> None:
        """One step of every parameter, by the gradients times a factor; they are not kept.

        Raises:
            StateTierFullError: the host tier has no room for a copy of the moments; nothing has
                changed.
        """
        with self._arena.writing() as at:
            source = floats(at.source, self._arena.nbytes)
            target = floats(at.target, self._arena.nbytes)
            count = target[self._step : self._step + 1]
            count.copy_(source[self._step : self._step + 1] + 1)
            for chunk in chunks_on_cpu(self._runs):
                kept = []
                for moment in self._moments:
                    first = moment + chunk.place
                    end = first + len(chunk.parameter)
                    kept.append(target[first:end])
                    if at.copies:
                        kept[-1].copy_(source[first:end])
                if gradient_factor != 1.0:
                    # Only now that there is room for the step: a refused one changes nothing.
                    chunk.gradient.mul_(gradient_factor)
                self._kernel(params, count.view(()), chunk, *kept)


def floats(address: int, nbytes: int) -> torch.Tensor:
    """Memory as float32, [nbytes / 4]; the caller sees to it that it stays mapped."""
    elements = nbytes // FLOAT_BYTES
    return torch.frombuffer(
        (ctypes.c_float * elements).from_address(address), dtype=torch.float32, count=elements
    )
