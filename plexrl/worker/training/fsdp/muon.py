"""Muon on shards by rows (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982).

The update of a matrix is its momentum made orthogonal, by five Newton-Schulz iterations on the
whole matrix in bfloat16. So the data ranks gather each matrix's update, one after another; each
computes the iterations, and steps its own rows. All ranks get the same bits. An update is scaled by
0.2·√(the larger side), which gives it about the size of AdamW's: one learning rate and one weight
decay serve both.

Momentum is in the place of AdamW's first moment. Parameters that are no matrix of a decoder layer
(embeddings, heads, norms, biases, joint matrices of experts) are stepped by AdamW.
"""

import math

import torch
import torch.distributed as dist
from torch.nn.functional import pad

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


def step_by_muon(
    state: FlatState, params: AdamParams, gradient_factor: float, data_ranks: int
) -> None:
    """One step of all parameters of `data_ranks` ranks, which are all processes; all call it."""
    count = state.begin_step(gradient_factor)
    momentum = MOMENTUM if params.momentum is None else params.momentum
    for piece, (parameter, gradient, first, second) in state.shards():
        if not is_by_muon(piece):
            step_of_torch(params, count, parameter, gradient, first, second)
            continue
        first.lerp_(gradient, 1 - momentum)
        whole = _gathered(gradient.lerp(first, momentum), piece, data_ranks)
        update = _zeropower_via_newtonschulz(whole, COEFFICIENTS, ITERATIONS, EPS)
        own = update[piece.offset[0] : piece.offset[0] + piece.shape[0]]
        size = RMS_OF_ADAMW * math.sqrt(max(piece.global_shape))
        parameter.mul_(1 - params.learning_rate * params.weight_decay)
        parameter.add_(own, alpha=-params.learning_rate * size)


def is_by_muon(piece: StateSlice) -> bool:
    """Whether a parameter is a matrix of a decoder layer."""
    return len(piece.global_shape) == 2 and ".layers." in piece.key.name


def _gathered(own: torch.Tensor, piece: StateSlice, data_ranks: int) -> torch.Tensor:
    """The whole matrix from the rows of all ranks, which FSDP divides evenly, the last ones less
    their padding."""
    if data_ranks == 1:
        return own
    rows = -(-piece.global_shape[0] // data_ranks)
    padded = pad(own, (0, 0, 0, rows - own.shape[0])).contiguous()
    whole = own.new_empty(rows * data_ranks, own.shape[1])
    dist.all_gather_into_tensor(whole, padded)
    return whole[: piece.global_shape[0]]
