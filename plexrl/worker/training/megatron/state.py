"""All state of one rank in its arena: Megatron's parameter buffers and their optimizer shards.

Megatron's data parallelism keeps a rank's parameters in a buffer, and their gradients in another
buffer with the same layout. Each data rank owns an equal share of every bucket of a buffer. The
distributed optimizer steps the rank's shares and all-gathers the rest (ZeRO-1). Arena layout:

    parameters          the buffers, the same on every data rank
    gradients           of the shares, reduced; accumulated over backward passes
    exp_avg, exp_avg_sq of the shares
    step
    scratch             of the buffers: gradients of one backward before reduction; no slice

If nothing has to be reduced, gradients and scratch are the same memory. Megatron's
`DistributedOptimizer` refuses CPU tensors and allocates its own shards. With float32 parameters its
step is AdamW on flat ranges, so torch's kernel is used instead.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.device.backend import WorkerArena
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.arena_tensors import (
    ArenaLayout,
    ParameterPiece,
    span,
    view,
    whole,
    whole_box,
)
from plexrl.worker.state.host.optimizer import adam_of_torch
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


class MegatronState:
    """The arena, its slices and the optimizer. Everything is zero at first. Only `slices` and
    `arena` may be used before `bind`."""

    host_arena = None

    def __init__(
        self,
        buffers: Sequence[BufferPlan],
        *,
        reduces: bool,
        make_arena: Callable[[int], WorkerArena] = Arena,
    ) -> None:
        """Without `reduces`, a share is a whole bucket, and gradients and scratch share memory.
        Only addresses are reserved: nothing is written."""
        self._buffers = buffers
        self._layout = ArenaLayout()
        self._homes = [
            self._lay_out(plan, [(0, plan.elements)], StatePart.PARAMETER) for plan in buffers
        ]
        self._owned_starts = {
            name: [self._lay_out(plan, plan.shares, part, suffix) for plan in buffers]
            for name, part, suffix in (
                ("grad", StatePart.GRADIENT, ""),
                *((moment, StatePart.OPTIMIZER, f"/{moment}") for moment in MOMENTS),
            )
        }
        self._step_slice = self._layout.add(STEP, whole_box(()))
        self._scratch_start = self._layout.nbytes
        self._scratch_starts = self._owned_starts["grad"]
        if reduces:
            self._scratch_starts = [self._layout.skip(plan.elements) for plan in buffers]
        self._reduces = reduces
        self.arena = make_arena(self._layout.nbytes)

    def bind(self) -> None:
        """Make the tensors in the arena, which has memory now. They stay valid when the memory
        comes and goes."""
        whole_buffers = [plan.elements for plan in self._buffers]
        shares = [sum(last - first for first, last in plan.shares) for plan in self._buffers]
        self.parameters = self._spans(self._homes, whole_buffers)
        self.scratch = self._spans(self._scratch_starts, whole_buffers)
        self._owned = {
            name: self._spans(starts, shares) for name, starts in self._owned_starts.items()
        }
        self._counted = [
            flat[first:last]
            for plan, flat in zip(self._buffers, self.gradients, strict=True)
            for first, last in _counted(plan)
        ]

    @property
    def slices(self) -> tuple[StateSlice, ...]:
        """All state, in arena order."""
        return tuple(self._layout.slices)

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
        for plan, flat, gradient in zip(self._buffers, self.scratch, self.gradients, strict=True):
            for (first, last), start in zip(plan.shares, _share_starts(plan), strict=True):
                gradient[start : start + last - first].add_(flat[first:last])

    def squared_gradients(self) -> torch.Tensor:
        """Sum of squares over the gradients that this rank counts, a scalar."""
        return sum_of_squares(self._counted)

    def step(self, params: AdamParams) -> None:
        """One AdamW step of this rank's shares."""
        count = view(self.arena, self._step_slice).add_(1)
        for index, plan in enumerate(self._buffers):
            for (first, last), start in zip(plan.shares, _share_starts(plan), strict=True):
                own = slice(start, start + last - first)
                state = (self._owned[name][index][own] for name in ("grad", *MOMENTS))
                adam_of_torch(params, count, self.parameters[index][first:last], *state)

    def zero_gradients(self) -> None:
        """Set the gradients of this rank's shares to zero."""
        for flat in self.gradients:
            flat.zero_()

    def clear_padding(self) -> None:
        """Set the memory that no slice covers to zero: loads do not write it, but norms and
        optimizer steps read it. The next backward clears the scratch."""
        memory = whole(self.arena)
        held = sorted((p.arena_offset, p.arena_offset + p.nbytes) for p in self.slices)
        ends = [(0, 0), *held, (self._scratch_start, self._scratch_start)]
        for (_, last), (first, _) in pairwise(ends):
            memory[last:first].zero_()

    # Layout

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
            for each in plan.parameters:
                begin, end = max(first, each.first), min(last, each.last)
                for piece in cut(each.pieces, begin - each.first, end - each.first):
                    offset = self._layout.nbytes + 4 * (each.first + piece.start - first)
                    key = StateKey(part=part, name=piece.name + suffix)
                    self._layout.place(key, piece, offset)
            self._layout.skip(last - first)
        return begin_bytes

    def _spans(self, starts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        return [span(self.arena, start, size) for start, size in zip(starts, sizes, strict=True)]


def _share_starts(plan: BufferPlan) -> list[int]:
    """Offset of each share among all shares, end to end."""
    starts = [0]
    for first, last in plan.shares[:-1]:
        starts.append(starts[-1] + last - first)
    return starts


def _counted(plan: BufferPlan) -> Iterator[tuple[int, int]]:
    """Ranges of the shares, end to end, without the parameters that another rank counts."""
    for (first, last), start in zip(plan.shares, _share_starts(plan), strict=True):
        begin = first
        for each in plan.parameters:
            if each.is_counted or each.last <= first or each.first >= last:
                continue
            if each.first > begin:
                yield start + begin - first, start + each.first - first
            begin = min(each.last, last)
        if begin < last:
            yield start + begin - first, start + last - first
