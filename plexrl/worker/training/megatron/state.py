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
step is AdamW on flat ranges, so torch's AdamW is used instead.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.layout.keys import ARENA_ALIGNMENT, StateKey, StatePart, StateSlice
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.arena_tensors import span, view, whole
from plexrl.worker.training.megatron.parameter_pieces import ParameterPiece, cut

MOMENTS = ("exp_avg", "exp_avg_sq")


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
    """The arena, its slices and the optimizer. Everything is zero at first."""

    def __init__(self, buffers: Sequence[BufferPlan], *, reduces: bool) -> None:
        """Without `reduces`, a share is a whole bucket, and gradients and scratch share memory."""
        self._buffers = buffers
        self._slices: list[StateSlice] = []
        self._nbytes = 0
        homes = [self._lay_out(plan, [(0, plan.elements)], StatePart.PARAMETER) for plan in buffers]
        owned = {
            name: [self._lay_out(plan, plan.shares, part, suffix) for plan in buffers]
            for name, part, suffix in (
                ("grad", StatePart.GRADIENT, ""),
                *((moment, StatePart.OPTIMIZER, f"/{moment}") for moment in MOMENTS),
            )
        }
        self._step_slice = self._add(StateKey(part=StatePart.OPTIMIZER, name="step"))
        self._scratch_start = self._nbytes
        scratch = [self._reserve(plan.elements) for plan in buffers] if reduces else owned["grad"]
        self.arena = Arena(self._nbytes)
        self.parameters = self._spans(homes, [plan.elements for plan in buffers])
        self.scratch = self._spans(scratch, [plan.elements for plan in buffers])
        self._reduces = reduces
        sizes = [sum(last - first for first, last in plan.shares) for plan in buffers]
        self._owned = {name: self._spans(starts, sizes) for name, starts in owned.items()}
        self._counted = [
            flat[first:last]
            for plan, flat in zip(buffers, self.gradients, strict=True)
            for first, last in _counted(plan)
        ]
        self._optimizer, self._steps = self._make_optimizer()

    @property
    def slices(self) -> tuple[StateSlice, ...]:
        """All state, in arena order."""
        return tuple(self._slices)

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
        return torch.stack([part.square().sum() for part in self._counted]).sum()

    def step(self, params: AdamParams) -> None:
        """One AdamW step of this rank's shares."""
        group = self._optimizer.param_groups[0]
        group["lr"] = params.learning_rate
        group["betas"] = (params.beta1, params.beta2)
        group["eps"] = params.eps
        group["weight_decay"] = params.weight_decay
        count = view(self.arena, self._step_slice)
        # There is one count for all shares, but torch keeps one for each tensor.
        for step in self._steps:
            step.copy_(count)
        self._optimizer.step()
        count.add_(1)

    def clear_padding(self) -> None:
        """Set the memory that no slice covers to zero: loads do not write it, but norms and
        optimizer steps read it. The next backward clears the scratch."""
        memory = whole(self.arena)
        held = sorted((p.arena_offset, p.arena_offset + p.nbytes) for p in self._slices)
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
        start = self._nbytes
        for first, last in shares:
            for each in plan.parameters:
                begin, end = max(first, each.first), min(last, each.last)
                for piece in cut(each.pieces, begin - each.first, end - each.first):
                    offset = self._nbytes + 4 * (each.first + piece.start - first)
                    self._add(StateKey(part=part, name=piece.name + suffix), piece, offset)
            self._reserve(last - first)
        return start

    def _add(
        self, key: StateKey, box: ParameterPiece | None = None, offset: int | None = None
    ) -> StateSlice:
        piece = StateSlice(
            key=key,
            dtype="F32",
            global_shape=box.global_shape if box else (),
            offset=box.offset if box else (),
            shape=box.shape if box else (),
            arena_offset=self._reserve(1) if offset is None else offset,
        )
        self._slices.append(piece)
        return piece

    def _reserve(self, elements: int) -> int:
        start = self._nbytes
        self._nbytes += -(-4 * elements // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        return start

    def _spans(self, starts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        return [span(self.arena, start, size) for start, size in zip(starts, sizes, strict=True)]

    def _make_optimizer(self) -> tuple[torch.optim.AdamW, list[torch.Tensor]]:
        shards: list[nn.Parameter] = []
        states: list[dict[str, torch.Tensor]] = []
        for index, plan in enumerate(self._buffers):
            for (first, last), start in zip(plan.shares, _share_starts(plan), strict=True):
                shard = nn.Parameter(self.parameters[index][first:last])
                own = slice(start, start + last - first)
                shard.grad = self.gradients[index][own]
                shards.append(shard)
                moments = {name: self._owned[name][index][own] for name in MOMENTS}
                states.append({"step": torch.zeros(()), **moments})
        optimizer = torch.optim.AdamW(shards, fused=True)
        for shard, state in zip(shards, states, strict=True):
            optimizer.state[shard] = state
        return optimizer, [state["step"] for state in states]


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
