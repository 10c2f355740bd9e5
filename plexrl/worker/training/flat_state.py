"""A rank's training state as flat float32 regions, and the AdamW optimizer on them.

The arena has one region for each kind of state (parameters, gradients, first and second moments),
all with the same layout, followed by the optimizer's step count. With a host optimizer the moments
and the count are in host memory instead (`plexrl.worker.state.host.optimizer`). AdamW is
elementwise, so each rank steps its region as one flat tensor. The padding between parameters stays
zero.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.arena_tensors import (
    AnyArena,
    ArenaLayout,
    ShardBox,
    span,
    view,
    whole_box,
)
from plexrl.worker.state.host.optimizer import AdamKernel, HostAdamW, step_of_torch
from plexrl.worker.state.host.transfer import HostRun

NORM_CHUNK_ELEMENTS = 1 << 22
"""Elements whose squares are in memory at once."""
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = StateKey(part=StatePart.OPTIMIZER, name="step")
"""The optimizer's step count: one float32 number."""


@dataclass(frozen=True, slots=True)
class _Region:
    """One kind of state of all parameters, in parameter order."""

    start: int
    """Offset in the arena, in bytes."""
    elements: int
    slices: dict[str, StateSlice]


class FlatState:
    """The arenas of one rank, and its optimizer. Parameters are zero until the caller fills
    them."""

    def __init__(
        self,
        boxes: Mapping[str, ShardBox],
        *,
        optimizer: str,
        make_arena: Callable[[int], WorkerArena] = Arena,
        lead: int = 0,
        kernel: AdamKernel = step_of_torch,
    ) -> None:
        """`optimizer` is the location of the optimizer's state, `device` or `host`. `kernel` steps
        it. `lead` elements before the first parameter are the framework's padding. Only addresses
        are reserved: nothing is written."""
        self._lead = lead
        self._kernel = kernel
        self._layout = ArenaLayout()
        self._regions: dict[str, _Region] = {}
        for region, part in (("param", StatePart.PARAMETER), ("grad", StatePart.GRADIENT)):
            self._add_region(self._layout, region, part, boxes)
        in_host = optimizer == "host"
        if in_host:
            self.arena = make_arena(self._layout.nbytes)
            self._host_start = host_start(self.arena.nbytes)
            layout = ArenaLayout(self._host_start)
        else:
            layout = self._layout
        for moment in MOMENTS:
            self._add_region(layout, moment, StatePart.OPTIMIZER, boxes)
        self._step_slice = layout.add(STEP, whole_box(()))
        self._host_slices = layout.slices if in_host else []
        self.host_arena: HostArena | None = None
        if in_host:
            self.host_arena = HostArena(layout.nbytes - self._host_start)
        else:
            self.arena = make_arena(self._layout.nbytes)
        self.memory: AnyArena = self.arena
        """Where parameters and gradients are: the arena, or what stands for it."""

    @property
    def slices(self) -> tuple[StateSlice, ...]:
        """All state, in arena order."""
        return (*self._layout.slices, *self._host_slices)

    @property
    def stepped_bytes(self) -> int:
        """End of the last parameter and gradient in the arena."""
        return self._layout.nbytes

    def in_host(self, arena: HostArena) -> "FlatState":
        """The same state with parameters and gradients in `arena`, for norms and steps only."""
        state = copy(self)
        state.memory = arena
        # It has views of the arena.
        state.__dict__.pop("_host_optimizer", None)
        return state

    @property
    def parameters(self) -> torch.Tensor:
        """All parameters, end to end with their padding. Float32."""
        return self._flat("param")

    @property
    def gradients(self) -> torch.Tensor:
        """All gradients, end to end with their padding. Float32."""
        return self._flat("grad")

    def parameter(self, name: str, elements: int) -> torch.Tensor:
        """The first `elements` of a parameter's shard and its padding, flat."""
        return span(self.memory, self._regions["param"].slices[name].arena_offset, elements)

    def gradient(self, name: str) -> torch.Tensor:
        """The gradient of a parameter's shard, in its shape."""
        return view(self.memory, self._regions["grad"].slices[name])

    def step(self, params: AdamParams, gradient_factor: float) -> None:
        """One step of all parameters, elementwise. Raises as `TrainingModel.step`."""
        if self.host_arena is not None:
            self._host_optimizer.step(params, gradient_factor)
            return
        step_count = self.begin_step(gradient_factor)
        moments = (self._flat(name) for name in MOMENTS)
        self._kernel(params, step_count, self.parameters, self.gradients, *moments)

    def begin_step(self, gradient_factor: float) -> torch.Tensor:
        """Scale the gradients and count a step of an optimizer on the device; returns the count,
        with this one."""
        if gradient_factor != 1.0:
            self.gradients.mul_(gradient_factor)
        return view(self.arena, self._step_slice).add_(1)

    def shards(self) -> Iterator[tuple[StateSlice, tuple[torch.Tensor, ...]]]:
        """Each parameter's slice, and views in the shape of its shard of parameter, gradient, first
        and second moment. The moments are on the device."""
        regions = [self._regions[name].slices for name in ("param", "grad", *MOMENTS)]
        for name, piece in regions[0].items():
            yield piece, tuple(view(self.arena, region[name]) for region in regions)

    def squared_gradients(self) -> torch.Tensor:
        """Sum of squares of this rank's gradients, a scalar."""
        return sum_of_squares([self.gradients])

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self.gradients.zero_()

    def _add_region(
        self, layout: ArenaLayout, region: str, part: StatePart, boxes: Mapping[str, ShardBox]
    ) -> None:
        start = layout.nbytes
        if layout is self._layout:
            layout.skip(self._lead)
        suffix = f"/{region}" if part == StatePart.OPTIMIZER else ""
        placed = {
            name: layout.add(
                StateKey(part=part, name=name + suffix),
                # Host memory has no padding, so that it is one extent of a version.
                box if layout is self._layout else replace(box, reserve=0),
            )
            for name, box in boxes.items()
        }
        self._regions[region] = _Region(start, (layout.nbytes - start) // 4, placed)

    def _flat(self, region: str) -> torch.Tensor:
        """A region of the arena, flat. On a GPU memory must be attached."""
        found = self._regions[region]
        return span(self.memory, found.start, found.elements)

    @cached_property
    def _host_optimizer(self) -> HostAdamW:
        assert self.host_arena is not None
        first, second = (self._regions[name] for name in MOMENTS)
        return HostAdamW(
            self.host_arena,
            self._runs(first),
            moments=(self._in_host(first.start), self._in_host(second.start)),
            step=self._in_host(self._step_slice.arena_offset),
            kernel=self._kernel,
        )

    def _runs(self, moment: _Region) -> list[HostRun]:
        """The runs of parameters that are contiguous among the moments too."""
        found: list[tuple[int, int, int]] = []
        for name, piece in self._regions["param"].slices.items():
            first = (piece.arena_offset - self._regions["param"].start) // 4
            kept = moment.slices[name]
            offset = (kept.arena_offset - moment.start) // 4
            count = -(-kept.nbytes // ARENA_ALIGNMENT) * ARENA_ALIGNMENT // 4
            if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (
                first,
                offset,
            ):
                first, offset, count = (*found[-1][:2], found.pop()[2] + count)
            if count:
                found.append((first, offset, count))
        return [
            HostRun(
                self.parameters[first : first + count],
                self.gradients[first : first + count],
                offset,
            )
            for first, offset, count in found
        ]

    def _in_host(self, offset: int) -> int:
        """An arena offset as an offset in host memory, in elements."""
        return (offset - self._host_start) // 4


def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum of squares over flat tensors, a scalar; without a second buffer of their size."""
    # `vector_norm` needs no buffer at all, but on the CPU loses digits within a chunk already.
    parts = [
        tensor[first : first + NORM_CHUNK_ELEMENTS].square().sum()
        for tensor in tensors
        for first in range(0, max(1, len(tensor)), NORM_CHUNK_ELEMENTS)
    ]
    return torch.stack(parts).sum()
