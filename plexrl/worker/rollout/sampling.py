"""Reproducible sampling of tokens for a whole batch.

Randomness is a hash of (seed, sample, position, token). So the tokens of a sample depend only on
its own logits, not on the other samples of the batch, its slot or the time it joined. The token
with the largest sum of logit and Gumbel noise is drawn, which samples from the softmax.

Shapes: N rows, V vocabulary.
"""

from dataclasses import dataclass

import torch

from plexrl.wire.tensors import Array
from plexrl.worker.rollout.generation import ODD_2, ODD_3

_MANTISSA_BITS = 53


@dataclass(slots=True)
class RowSampling:
    """Sampling parameters of N rows, each a tensor `[N]`."""

    temperature: torch.Tensor
    """float32; 0 is greedy."""
    top_p: torch.Tensor
    """float32; 1 keeps the whole vocabulary."""
    top_k: torch.Tensor
    """int64; 0 keeps the whole vocabulary."""
    stream: torch.Tensor
    """int64: a hash of seed and sample that identifies the row's random stream."""


def draw(logprobs_NV: torch.Tensor, rows: RowSampling, position_N: torch.Tensor) -> torch.Tensor:
    """One token for each row, int64 `[N]`; `position_N` counts the tokens drawn so far."""
    greedy_N = rows.temperature == 0
    scores_NV = _scores(logprobs_NV, rows)
    noise_NV = gumbel(rows.stream, position_N, logprobs_NV.shape[1])
    noise_NV = torch.where(greedy_N[:, None], 0.0, noise_NV)
    return (scores_NV + noise_NV).argmax(dim=-1)


def sampling_logprobs(
    logprobs_NV: torch.Tensor, rows: RowSampling, token_N: torch.Tensor
) -> torch.Tensor:
    """Logprob of each row's token under the distribution that `draw` draws from, float32 `[N]`; of
    a greedy row 0, as it draws no other token."""
    scores_NV = _scores(logprobs_NV, rows).log_softmax(dim=-1)
    return torch.where(rows.temperature == 0, 0.0, scores_NV.gather(-1, token_N[:, None])[:, 0])


def likeliest_tokens(logprobs_NV: torch.Tensor, count: int) -> tuple[Array, Array]:
    """Ids int32 and logprobs float32 of each row's likeliest tokens, the likeliest first, both
    `[N, count]`; `count` is at most V."""
    found = logprobs_NV.topk(count, dim=-1)
    return found.indices.int().cpu().numpy(), found.values.cpu().numpy()


def _scores(logprobs_NV: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    """Logits of the distributions that tokens are drawn from; a greedy row's are of temperature
    1."""
    temperature_N = torch.where(rows.temperature == 0, 1.0, rows.temperature)
    scores_NV = logprobs_NV
    if bool((temperature_N != 1.0).any()):
        scores_NV = scores_NV / temperature_N[:, None]
    if bool((rows.top_k > 0).any()) or bool((rows.top_p < 1.0).any()):
        scores_NV = scores_NV.masked_fill(~allowed(scores_NV, rows.top_k, rows.top_p), -torch.inf)
    return scores_NV


def allowed(scores_NV: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask of tokens that may be drawn, bool `[N, V]`: among the k likeliest, the fewest whose
    total probability reaches p. The likeliest token is always included; ties go to the lower id."""
    size = scores_NV.shape[1]
    ordered_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    k_N1 = torch.where(top_k > 0, top_k.clamp(max=size), size)[:, None]
    kept_NV = torch.arange(size, device=scores_NV.device)[None, :] < k_N1
    probability_NV = ordered_NV.masked_fill(~kept_NV, -torch.inf).softmax(dim=-1)
    before_NV = probability_NV.cumsum(dim=-1) - probability_NV
    kept_NV &= (before_NV < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept_NV[:, 0] = True
    return torch.zeros_like(kept_NV).scatter(-1, order_NV, kept_NV)


def gumbel(stream_N: torch.Tensor, position_N: torch.Tensor, size: int) -> torch.Tensor:
    """Standard Gumbel noise, float32 `[N, size]`."""
    token_1V = torch.arange(1, size + 1, device=stream_N.device)[None, :]
    row_N = _mix(stream_N + position_N * ODD_2)
    bits_NV = _mix(row_N[:, None] + token_1V * ODD_3)
    # An arithmetic shift copies the sign bit; the mask keeps the upper bits only.
    upper_NV = (bits_NV >> (64 - _MANTISSA_BITS)) & ((1 << _MANTISSA_BITS) - 1)
    uniform_NV = (upper_NV.double() + 0.5) / (1 << _MANTISSA_BITS)
    return (-(-uniform_NV.log()).log()).float()


def _mix(values: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64, whose products wrap like unsigned ones."""
    values = (values ^ _shift(values, 30)) * ODD_2
    values = (values ^ _shift(values, 27)) * ODD_3
    return values ^ _shift(values, 31)


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)
