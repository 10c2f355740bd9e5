"""All state of one rank in its arena: Megatron's parameter buffers, and optimizer shards of them.

Megatron's data parallelism keeps the parameters of a rank in a buffer and their gradients in
another alike. Each data rank owns an equal share of every bucket of a buffer; the distributed
optimizer steps the shares and gathers the rest (ZeRO-1). In the arena lie, in this order:

    parameters          the buffers, the same on every data rank
    gradients           of the shares: reduced, they add up from one backward to the next
    exp_avg, exp_avg_sq of the shares
    step
    scratch             of the buffers: what one backward adds up before it is reduced; no slice

Where nothing is to be reduced, the gradients are the scratch. Megatron's `DistributedOptimizer`
takes no CPU tensors and allocates shards of its own; with float32 parameters its step is AdamW on
flat ranges, which torch has.
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
from plexrl.worker.training.megatron.boxes import Piece, cut

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A parameter in a buffer."""

    pieces: tuple[Piece, ...]
    first: int
    """Element of the buffer at which it begins."""
    last: int
    is_counted: bool
    """Its copy on this rank is the one that the gradient norm counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """One buffer of Megatron's."""

    elements: int
    tenants: tuple[Tenant, ...]
    """In the order of the buffer."""
    shares: tuple[tuple[int, int], ...]
    """First and last element of what this rank owns of each bucket."""


class MegatronState:
    """The arena, its slices and the optimizer. Everything is zero at first."""

    def __init__(self, buffers: Sequence[BufferPlan], *, reduces: bool) -> None:
        """Without `reduces` every share is a whole bucket, and scratch and gradients are one."""
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
        """Of each buffer's shares, end to end."""
        return self._owned["grad"]

    def start_backward(self) -> None:
        """Make the scratch ready to add up gradients."""
        if self._reduces:
            for flat in self.scratch:
                flat.zero_()

    def take_reduced(self) -> None:
        """Add what the scratch holds of this rank's shares to the gradients."""
        if not self._reduces:
            return
        for plan, flat, gradient in zip(self._buffers, self.scratch, self.gradients, strict=True):
            for (first, last), place in zip(plan.shares, _places(plan), strict=True):
                gradient[place : place + last - first].add_(flat[first:last])

    def squared_gradients(self) -> torch.Tensor:
        """The sum over what this rank counts, a scalar."""
        return torch.stack([part.square().sum() for part in self._counted]).sum()

    def step(self, params: AdamParams) -> None:
        """One AdamW step of this rank's shares."""
        group = self._optimizer.param_groups[0]
        group["lr"] = params.learning_rate
        group["betas"] = (params.beta1, params.beta2)
        group["eps"] = params.eps
        group["weight_decay"] = params.weight_decay
        count = view(self.arena, self._step_slice)
        # One count for all shares; but torch steps each tensor's own.
        for step in self._steps:
            step.copy_(count)
        self._optimizer.step()
        count.add_(1)

    def clear_padding(self) -> None:
        """Set to zero what no slice covers: loads leave it as they find it, and norms and
        optimizer steps run over it. The scratch is the next backward's to clear."""
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
        """A region with the shares of a buffer end to end; returns where it starts, in bytes."""
        start = self._nbytes
        for first, last in shares:
            for tenant in plan.tenants:
                begin, end = max(first, tenant.first), min(last, tenant.last)
                for piece in cut(tenant.pieces, begin - tenant.first, end - tenant.first):
                    place = self._nbytes + 4 * (tenant.first + piece.start - first)
                    self._add(StateKey(part=part, name=piece.name + suffix), piece, place)
            self._reserve(last - first)
        return start

    def _add(self, key: StateKey, box: Piece | None = None, place: int | None = None) -> StateSlice:
        piece = StateSlice(
            key=key,
            dtype="F32",
            global_shape=box.global_shape if box else (),
            offset=box.offset if box else (),
            shape=box.shape if box else (),
            arena_offset=self._reserve(1) if place is None else place,
        )
        self._slices.append(piece)
        return piece

    def _reserve(self, elements: int) -> int:
        start = self._nbytes
        self._nbytes += -(-4 * elements // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
        return start

    def _spans(self, starts: Sequence[int], sizes: Sequence[int]) -> list[torch.Tensor]:
        return [span(self.arena, *place) for place in zip(starts, sizes, strict=True)]

    def _make_optimizer(self) -> tuple[torch.optim.AdamW, list[torch.Tensor]]:
        shards: list[nn.Parameter] = []
        states: list[dict[str, torch.Tensor]] = []
        for index, plan in enumerate(self._buffers):
            for (first, last), place in zip(plan.shares, _places(plan), strict=True):
                shard = nn.Parameter(self.parameters[index][first:last])
                own = slice(place, place + last - first)
                shard.grad = self.gradients[index][own]
                shards.append(shard)
                moments = {name: self._owned[name][index][own] for name in MOMENTS}
                states.append({"step": torch.zeros(()), **moments})
        optimizer = torch.optim.AdamW(shards, fused=True)
        for shard, state in zip(shards, states, strict=True):
            optimizer.state[shard] = state
        return optimizer, [state["step"] for state in states]


def _places(plan: BufferPlan) -> list[int]:
    """Where each share begins among all of them, end to end."""
    places = [0]
    for first, last in plan.shares[:-1]:
        places.append(places[-1] + last - first)
    return places


def _counted(plan: BufferPlan) -> Iterator[tuple[int, int]]:
    """Ranges of the shares, end to end, that hold everything but what is counted elsewhere."""
    for (first, last), place in zip(plan.shares, _places(plan), strict=True):
        begin = first
        for tenant in plan.tenants:
            if tenant.is_counted or tenant.last <= first or tenant.first >= last:
                continue
            if tenant.first > begin:
                yield place + begin - first, place + tenant.first - first
            begin = min(tenant.last, last)
        if begin < last:
            yield place + begin - first, place + last - first
