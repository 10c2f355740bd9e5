"""All state of one rank in its arenas: Megatron's parameter buffers and their optimizer shards.

Megatron's data parallelism keeps a rank's parameters in a buffer, and their gradients in another
buffer with the same layout. Each data rank owns an equal share of every bucket of a buffer. The
distributed optimizer steps the rank's shares and all-gathers the rest (ZeRO-1). Arena layout, in
float32:

    parameters          the buffers, the same on every data rank
    gradients           of the shares, reduced; accumulated over backward passes
    exp_avg, exp_avg_sq of the shares; with a host optimizer in host memory instead
    step
    scratch             of the buffers: gradients of one backward before reduction; no slice

With another dtype of computation the parameters are those of the shares (Megatron's main
parameters), and the buffers, which are a cast of all ranks' shares, follow the scratch:

    casts               the buffers; no slice

If nothing has to be reduced, gradients and scratch are the same memory. Megatron's
`DistributedOptimizer` refuses CPU tensors and allocates its own shards, and its
`HybridDeviceOptimizer` its own host memory, in which no version could be kept without a copy. Both
step AdamW on flat ranges, so torch's kernel and `plexrl.worker.state.host.optimizer` are used
instead.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from plexrl.model.layout import ALIGNED_ELEMENTS
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.host_arena import HostArena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.protocol.host_requests import host_start
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.arena_tensors import (
    ARENA_DTYPES,
    AnyArena,
    ArenaLayout,
    ParameterPiece,
    span,
    view,
    whole,
    whole_box,
)
from plexrl.worker.state.host.optimizer import HostAdamW, step_of_torch
from plexrl.worker.state.host.transfer import HostRun
from plexrl.worker.training.flat_state import MOMENTS, STEP, sum_of_squares
from plexrl.worker.training.megatron.parameter_pieces import cut


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferParameter:
    """A parameter in a buffer."""

    pieces: tuple[ParameterPiece, ...]
    first: int
    """Offset of its first element in the buffer."""
    last: int
    """Offset behind its last element."""
    is_counted: bool
    """The gradient norm counts this rank's copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """One of Megatron's buffers."""

    elements: int
    parameters: tuple[BufferParameter, ...]
    """In buffer order."""
    shares: tuple[tuple[int, int], ...]
    """This rank's range of each bucket: offsets of its first element and behind its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """This rank's range of one bucket."""

    buffer: int
    """Index of the bucket's buffer."""
    first: int
    """Offset of its first element in the buffer."""
    last: int
    """Offset behind its last element."""
    start: int
    """Offset of its first element among the buffer's shares, end to end."""

    @property
    def in_buffer(self) -> slice:
        """Its elements in the buffer."""
        return slice(self.first, self.last)

    @property
    def owned(self) -> slice:
        """Its elements among the buffer's shares, end to end."""
        return slice(self.start, self.start + self.last - self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostPart:
    """A parameter in a share whose moments are in host memory."""

    share: _Share
    at: int
    """Offset of its first element in the share."""
    pieces: Sequence[ParameterPiece]
    offset: int
    """Offset of its first element in each moment."""

    @property
    def room(self) -> int:
        """Its elements and their padding. No other parameter is in the share's padding, because
        parameters and shares begin at multiples of the arena's alignment."""
        elements = self.pieces[-1].start + self.pieces[-1].elements - self.pieces[0].start
        return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


class MegatronState:
    """The arenas, their slices and the optimizer. Everything is zero at first. Only `slices` and
    the arenas may be used before `bind`."""

    def __init__(
        self,
        buffers: Sequence[BufferPlan],
        *,
        reduces: bool,
        compute_dtype: str = "float32",
        optimizer: str = "device",
        make_arena: Callable[[int], WorkerArena] = Arena,
    ) -> None:
        """Without `reduces`, a share is a whole bucket, and gradients and scratch share memory.
        `compute_dtype` is that of the buffers that Megatron computes from, `optimizer` the location
        of the moments, `device` or `host`. Only addresses are reserved: nothing is written."""
        self._buffers = buffers
        self._shares = [share for index, plan in enumerate(buffers) for share in _of(index, plan)]
        self._compute_dtype = ARENA_DTYPES[compute_dtype]
        self._layout = ArenaLayout()
        self.casts = compute_dtype != "float32"
        if self.casts:
            mains = self._lay_out_shares(StatePart.PARAMETER)
        else:
            self._homes = [
                self._lay_out(plan, [(0, plan.elements)], StatePart.PARAMETER) for plan in buffers
            ]
        self._owned_starts = {"grad": self._lay_out_shares(StatePart.GRADIENT)}
        if self.casts:
            self._owned_starts["param"] = mains
        if optimizer == "device":
            for moment in MOMENTS:
                starts = self._lay_out_shares(StatePart.OPTIMIZER, f"/{moment}")
                self._owned_starts[moment] = starts
            self._step_slice = self._layout.add(STEP, whole_box(()))
        self._scratch_start = self._layout.nbytes
        self._scratch_starts = self._owned_starts["grad"]
        if reduces:
            self._scratch_starts = [self._layout.skip(plan.elements) for plan in buffers]
        if self.casts:
            self._homes = [
                self._layout.skip(buffer.elements, self._compute_dtype) for buffer in buffers
            ]
        self._reduces = reduces
        self.arena = make_arena(self._layout.nbytes)
        self.memory: AnyArena = self.arena
        """Where parameters and gradients are: the arena, or what stands for it."""
        self.host_arena: HostArena | None = None
        self._host_slices: list[StateSlice] = []
        if optimizer == "host":
            self._lay_out_host()

    def bind(self) -> None:
        """Make the tensors in the arena, which has memory now. They stay valid when the memory
        comes and goes."""
        whole_buffers = [plan.elements for plan in self._buffers]
        self.parameters = self._spans(self._homes, whole_buffers, self._compute_dtype)
        self.scratch = self._spans(self._scratch_starts, whole_buffers)
        self._bind_shares()

    @property
    def stepped_bytes(self) -> int:
        """End of the last parameter and gradient in the arena."""
        return self._scratch_start

    def in_host(self, arena: HostArena) -> "MegatronState":
        """The same state with parameters and gradients in `arena`, for norms and steps only. With
        casts it has no buffers."""
        state = copy(self)
        state.memory, state.parameters, state.scratch = arena, [], []
        # It has views of the arena.
        state.__dict__.pop("_host_optimizer", None)
        if not self.casts:
            sizes = [plan.elements for plan in self._buffers]
            state.parameters = state._spans(self._homes, sizes)
        state._bind_shares()
        return state

    def _bind_shares(self) -> None:
        shares = [sum(last - first for first, last in plan.shares) for plan in self._buffers]
        self._owned = {
            name: self._spans(starts, shares) for name, starts in self._owned_starts.items()
        }
        self._counted = [
            flat[first:last]
            for plan, flat in zip(self._buffers, self.gradients, strict=True)
            for first, last in _counted(plan)
        ]
        # All of a share may count on another rank: of many ranks, one may have only norms.
        self._counted = self._counted or [self.gradients[0][:0]]

    @property
    def slices(self) -> tuple[StateSlice, ...]:
        """All state, in arena order."""
        return (*self._layout.slices, *self._host_slices)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Gradients of each buffer's shares, end to end."""
        return self._owned["grad"]

    def start_backward(self) -> None:
        """Set the scratch to zero."""
        if self._reduces:
            for flat in self.scratch:
                flat.zero_()

    def take_reduced(self) -> None:
        """Add the reduced gradients of this rank's shares from the scratch to the gradients."""
        if not self._reduces:
            return
        for share in self._shares:
            gradient = self.gradients[share.buffer][share.owned]
            gradient.add_(self.scratch[share.buffer][share.in_buffer])

    def cast(self) -> None:
        """Write this rank's shares of the buffers that Megatron computes from."""
        if not self.casts:
            return
        for share in self._shares:
            self.parameters[share.buffer][share.in_buffer].copy_(self._main(share))

    def squared_gradients(self) -> torch.Tensor:
        """Sum of squares over the gradients that this rank counts, a scalar."""
        return sum_of_squares(self._counted)

    def step(self, params: AdamParams, gradient_factor: float) -> None:
        """One AdamW step of this rank's shares. Raises as `TrainingModel.step`."""
        if self.host_arena is not None:
            self._host_optimizer.step(params, gradient_factor)
            return
        if gradient_factor != 1.0:
            for flat in self.gradients:
                flat.mul_(gradient_factor)
        count = view(self.arena, self._step_slice).add_(1)
        for share in self._shares:
            state = (self._owned[name][share.buffer][share.owned] for name in ("grad", *MOMENTS))
            step_of_torch(params, count, self._main(share), *state)

    def zero_gradients(self) -> None:
        """Set the gradients of this rank's shares to zero."""
        for flat in self.gradients:
            flat.zero_()

    def clear_padding(self) -> None:
        """Set the memory that no slice covers to zero: loads do not write it, but norms and
        optimizer steps read it. The next backward clears the scratch."""
        memory = whole(self.arena)
        held = sorted((p.arena_offset, p.arena_offset + p.nbytes) for p in self._layout.slices)
        ends = [(0, 0), *held, (self._scratch_start, self._scratch_start)]
        for (_, last), (first, _) in pairwise(ends):
            memory[last:first].zero_()

    def _main(self, share: _Share) -> torch.Tensor:
        """The parameters that the optimizer steps, flat."""
        if self.casts:
            return self._owned["param"][share.buffer][share.owned]
        return self.parameters[share.buffer][share.in_buffer]

    @cached_property
    def _host_optimizer(self) -> HostAdamW:
        assert self.host_arena is not None
        start = host_start(self.arena.nbytes)
        runs = []
        for part in self._host_parts:
            own = slice(part.at, part.at + part.room)
            gradient = self.gradients[part.share.buffer][part.share.owned]
            runs.append(HostRun(self._main(part.share)[own], gradient[own], part.offset))
        return HostAdamW(
            self.host_arena,
            runs,
            moments=self._host_moments,
            step=(self._step_slice.arena_offset - start) // 4,
        )

    # Layout

    def _lay_out_shares(self, part: StatePart, suffix: str = "") -> list[int]:
        """Add a region with the shares of each buffer; returns their offsets in bytes."""
        return [self._lay_out(plan, plan.shares, part, suffix) for plan in self._buffers]

    def _lay_out(
        self,
        plan: BufferPlan,
        shares: Sequence[tuple[int, int]],
        part: StatePart,
        suffix: str = "",
    ) -> int:
        """Add a region with a buffer's shares end to end; returns its offset in bytes."""
        begin_bytes = self._layout.nbytes
        for first, last in shares:
            for at, pieces in _held(plan, first, last):
                _place(self._layout, pieces, self._layout.nbytes + 4 * at, part, suffix)
            self._layout.skip(last - first)
        return begin_bytes

    def _lay_out_host(self) -> None:
        """Reserve host memory for the moments and the step count, without the padding between
        parameters, so that they are one extent of a version."""
        self._host_parts: list[_HostPart] = []
        elements = 0
        for share in self._shares:
            for at, pieces in _held(self._buffers[share.buffer], share.first, share.last):
                part = _HostPart(share=share, at=at, pieces=pieces, offset=elements)
                self._host_parts.append(part)
                elements += part.room
        self._host_moments = (0, elements)
        start = host_start(self.arena.nbytes)
        layout = ArenaLayout(start)
        for moment in MOMENTS:
            begin = layout.skip(elements)
            for part in self._host_parts:
                offset = begin + 4 * part.offset
                _place(layout, part.pieces, offset, StatePart.OPTIMIZER, f"/{moment}")
        self._step_slice = layout.add(STEP, whole_box(()))
        self._host_slices = layout.slices
        self.host_arena = HostArena(layout.nbytes - start)

    def _spans(
        self, starts: Sequence[int], sizes: Sequence[int], dtype: str = "F32"
    ) -> list[torch.Tensor]:
        return [
            span(self.memory, start, size, dtype) for start, size in zip(starts, sizes, strict=True)
        ]


def _of(index: int, plan: BufferPlan) -> Iterator[_Share]:
    """The shares of a buffer, end to end."""
    start = 0
    for first, last in plan.shares:
        yield _Share(buffer=index, first=first, last=last, start=start)
        start += last - first


def _held(plan: BufferPlan, first: int, last: int) -> Iterator[tuple[int, list[ParameterPiece]]]:
    """For each parameter in a range of a buffer: the offset of its first element in the range, and
    its boxes there, in order."""
    for parameter in plan.parameters:
        pieces = cut(parameter.pieces, max(first - parameter.first, 0), last - parameter.first)
        if pieces:
            yield parameter.first + pieces[0].start - first, pieces


def _place(
    layout: ArenaLayout,
    pieces: Sequence[ParameterPiece],
    offset: int,
    part: StatePart,
    suffix: str,
) -> None:
    """Add slices for boxes that lie end to end, from `offset` bytes on."""
    for piece in pieces:
        at = offset + 4 * (piece.start - pieces[0].start)
        layout.place(StateKey(part=part, name=piece.name + suffix), piece, at)


def _counted(plan: BufferPlan) -> Iterator[tuple[int, int]]:
    """Ranges of the shares, end to end, without the parameters that another rank counts."""
    for share in _of(0, plan):
        begin, offset = share.first, share.start - share.first
        for parameter in plan.parameters:
            if (
                parameter.is_counted
                or parameter.last <= share.first
                or parameter.first >= share.last
            ):
                continue
            if parameter.first > begin:
                yield offset + begin, offset + parameter.first
            begin = min(parameter.last, share.last)
        if begin < share.last:
            yield offset + begin, offset + share.last
