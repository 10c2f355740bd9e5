"""AdamW on the CPU, with its moments in the host tier (ZeRO-Offload).

The default kernel is torch's fused AdamW. It is elementwise, so stepping chunk by chunk gives the
same bits as one step over everything. Compared with the fused kernel of a GPU, each step's change
of a parameter differs by rounding only, by a relative 1e-6.

The first step after a version was saved or loaded copies the moments: it reads them from the
version, which stays unchanged, and writes them to newly allocated memory, one cache-sized chunk at
a time. Later steps are in place.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch

from plexrl.statemanager.client.host_arena import HostArena
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.host.transfer import HostRun, chunks_on_cpu

FLOAT_BYTES = 4

AdamKernel = Callable[
    [AdamParams, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None
]
"""Updates parameters, with their gradients, first and second moments, in place. The second argument
is the number of steps including this one, float32 `[]`."""


def adam_of_torch(
    params: AdamParams,
    count: torch.Tensor,
    parameters: torch.Tensor,
    gradients: torch.Tensor,
    first_moment: torch.Tensor,
    second_moment: torch.Tensor,
) -> None:
    """An `AdamKernel`: torch's fused AdamW."""
    torch._fused_adamw_(
        [parameters],
        [gradients],
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
    """The optimizer of one rank's parameters."""

    def __init__(
        self,
        arena: HostArena,
        runs: Sequence[HostRun],
        *,
        moments: tuple[int, int],
        step: int,
        kernel: AdamKernel = adam_of_torch,
    ) -> None:
        """`moments` and `step` are the offsets of the first and second moments and of the step
        count in the arena, in elements; all float32."""
        self._arena = arena
        self._runs = runs
        self._moments = moments
        self._step = step
        self._kernel = kernel

    def step(self, params: AdamParams, gradient_factor: float = 1.0) -> None:
        """One step of every parameter, with the gradients times a factor. Overwrites gradients.

        Raises:
            StateTierFullError: the host tier has no space for a copy of the moments; nothing is
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
                    first = moment + chunk.offset
                    end = first + len(chunk.parameter)
                    kept.append(target[first:end])
                    if at.copies:
                        kept[-1].copy_(source[first:end])
                if gradient_factor != 1.0:
                    # Only after the memory is allocated: a refused step changes nothing.
                    chunk.gradient.mul_(gradient_factor)
                self._kernel(params, count.view(()), chunk.parameter, chunk.gradient, *kept)


def floats(address: int, nbytes: int) -> torch.Tensor:
    """Memory as float32, [nbytes / 4]. The caller keeps the memory mapped."""
    elements = nbytes // FLOAT_BYTES
    return torch.frombuffer(
        (ctypes.c_float * elements).from_address(address), dtype=torch.float32, count=elements
    )
