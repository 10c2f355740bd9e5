"""Muon on shards (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982).

The update of a matrix is its momentum made orthogonal, by five Newton-Schulz iterations on the
whole matrix in bfloat16. So the ranks put each matrix's update together, one after another: each
writes its own box into a matrix of zeros, and an all-reduce sums them, which is exact. Each rank
computes the iterations, and steps its own box. All ranks get the same bits, and the boxes may be
cut in any way: by rows over data ranks, by rows or columns over tensor ranks. An update is scaled
by 0.2·√(the larger side), which gives it about the size of AdamW's: one learning rate and one
weight decay serve both.

Momentum is in the place of AdamW's first moment. Parameters that are no matrix of a decoder layer
(embeddings, heads, norms, biases, joint matrices of experts) are stepped by AdamW.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

# Public only as part of an optimizer that owns whole parameters.
from torch.optim._muon import _zeropower_via_newtonschulz

from plexrl.statemanager.layout.keys import StateSlice
from plexrl.wire.operations import AdamParams
from plexrl.worker.state.host.optimizer import step_of_torch
from plexrl.worker.training.flat_state import FlatState

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.775, 2.0315)
ITERATIONS = 5
EPS = 1e-7
RMS_OF_ADAMW = 0.2

Shapes = Mapping[str, tuple[int, ...]]


def step_by_muon(
    state: FlatState, params: AdamParams, gradient_factor: float, shapes: Shapes
) -> None:
    """One step of all parameters. All processes call it together.

    `shapes` are those of all whole parameters, by name, in the same order on every rank, of which
    this one may have no part. The ranks' boxes of a matrix of a decoder layer do not overlap.
    """
    count = state.begin_step(gradient_factor)
    momentum = MOMENTUM if params.momentum is None else params.momentum
    shards = {piece.key.name: (piece, own) for piece, own in state.shards()}
    for name, shape in shapes.items():
        found = shards.get(name)
        if not is_by_muon(name, shape):
            if found is not None:
                step_of_torch(params, count, *found[1])
            continue
        whole = torch.zeros(shape, device=count.device)
        if found is not None:
            piece, (parameter, gradient, first, _) = found
            first.lerp_(gradient, 1 - momentum)
            whole[_box(piece)] = gradient.lerp(first, momentum)
        dist.all_reduce(whole)
        if found is not None:
            update = _zeropower_via_newtonschulz(whole, COEFFICIENTS, ITERATIONS, EPS)
            parameter.mul_(1 - params.learning_rate * params.weight_decay)
            size = RMS_OF_ADAMW * math.sqrt(max(shape))
            parameter.add_(update[_box(piece)], alpha=-params.learning_rate * size)


def is_by_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix of a decoder layer."""
    return len(shape) == 2 and ".layers." in name


def _box(piece: StateSlice) -> tuple[slice, ...]:
    ends = zip(piece.offset, piece.shape, strict=True)
    return tuple(slice(first, first + extent) for first, extent in ends)
