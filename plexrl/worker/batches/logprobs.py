"""Logprobs of a batch's own tokens, and what else is known of the distributions that they are
predicted from, of a model's logits.

Shapes: B rows, L tokens of the longest row, P = L - 1 predicted tokens, V vocabulary, W size of a
tensor rank's part of the vocabulary, K likeliest tokens; `...` any shape.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plexrl.wire.operations import LOSS_INPUTS, ForwardParams, LossSpec
from plexrl.worker.batches.packing import MicroBatch

CHUNK_ELEMENTS = 1 << 24
"""Elements of the logits of which an entropy is computed at a time: 64 MiB."""

TokenValues = dict[str, torch.Tensor]
"""Numbers of a micro-batch's tokens by name, float32 `[B, L]`: `logprobs`, and if wanted
`entropy`, and `top_ids` (int64) and `top_logprobs` `[B, L, K]`. Column 0 is 0."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """A tensor rank's part of the vocabulary."""

    first_token: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The values that are computed beside the logprobs."""

    entropy: bool = False
    entropy_gradient: bool = False
    """The entropy has a graph."""
    top: int = 0
    """K."""


def wanted_by_loss(loss: LossSpec) -> Wanted:
    """A loss of a policy reports the entropy, and may have it as a term."""
    has_policy = "advantages" in LOSS_INPUTS[loss.name]
    return Wanted(entropy=has_policy, entropy_gradient=loss.entropy_coef > 0)


def wanted_by_forward(params: ForwardParams) -> Wanted:
    """The values that a `forward` asks for."""
    return Wanted(entropy=params.entropy, top=params.top_logprobs)


def token_values(
    logits_BLV: torch.Tensor,
    batch: MicroBatch,
    wanted: Wanted,
    shard: VocabularyShard | None = None,
) -> TokenValues:
    """The numbers of every token given those before it.

    With a `shard` the logits are `[B, L, W]`, on every rank of its group; no rank ever has those of
    the whole vocabulary.
    """
    predicted_BPV = logits_BLV[:, :-1].float()
    tokens_BP = batch.tokens_BL[:, 1:]
    if shard is None:
        chosen_BP = predicted_BPV.gather(-1, tokens_BP[..., None])[..., 0]
        found = {"logprobs": chosen_BP - predicted_BPV.logsumexp(-1)}
    else:
        found = {"logprobs": sharded_logprobs(predicted_BPV, tokens_BP, shard)}
    found |= distribution_values(predicted_BPV, wanted, shard)
    return {name: by_token(values, batch) for name, values in found.items()}


def distribution_values(
    logits: torch.Tensor, wanted: Wanted, shard: VocabularyShard | None = None
) -> TokenValues:
    """What is wanted of distributions, from float32 logits `[..., V]`: entries `[...]`, or
    `[..., K]`."""
    found: TokenValues = {}
    if wanted.entropy:
        with torch.set_grad_enabled(torch.is_grad_enabled() and wanted.entropy_gradient):
            found["entropy"] = entropy(logits, shard)
    if wanted.top:
        with torch.no_grad():
            found["top_ids"], found["top_logprobs"] = likeliest(logits, wanted.top, shard)
    return found


def sharded_logprobs(
    logits_BPW: torch.Tensor, tokens_BP: torch.Tensor, shard: VocabularyShard
) -> torch.Tensor:
    """Logprobs of tokens from float32 logits of one part of the vocabulary."""
    found = _ShardedLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_BPW, tokens_BP, shard.first_token, shard.group
    )
    assert isinstance(found, torch.Tensor)
    return found


def entropy(logits: torch.Tensor, shard: VocabularyShard | None = None) -> torch.Tensor:
    """Entropy in nats of distributions with float32 logits `[..., V]`. Some rows at a time, in both
    passes: beside the logits and their gradient it takes little memory. Logits may be -inf."""
    found = _Entropy.apply(  # type: ignore[no-untyped-call]
        logits, None if shard is None else shard.group
    )
    assert isinstance(found, torch.Tensor)
    return found


def likeliest(
    logits: torch.Tensor, count: int, shard: VocabularyShard | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logprobs `[..., count]` of the likeliest tokens, the likeliest first. `count` is at
    most V."""
    own = logits.topk(min(count, logits.shape[-1]), dim=-1)
    normaliser = logits.logsumexp(-1, keepdim=True)
    if shard is None:
        return own.indices, own.values - normaliser
    # A part may have fewer tokens than are wanted.
    spare = (0, count - own.values.shape[-1])
    values = nn.functional.pad(own.values, spare, value=-torch.inf)
    ids = nn.functional.pad(own.indices + shard.first_token, spare)
    gathered = [_gathered(tensor, shard.group) for tensor in (values, ids, normaliser)]
    best = torch.cat(gathered[0], dim=-1).topk(count, dim=-1)
    ids = torch.cat(gathered[1], dim=-1).gather(-1, best.indices)
    return ids, best.values - torch.cat(gathered[2], dim=-1).logsumexp(-1, keepdim=True)


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, values.contiguous(), group=group)
    return found


class _Entropy(torch.autograd.Function):
    """H = log Z - Σ p·x; x are the logits less the largest, Z is Σ exp(x) and p is exp(x) / Z."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        largest = logits.amax(-1)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        sums_2N = torch.empty(2, largest.numel(), dtype=logits.dtype, device=logits.device)
        for part, x_CV in _chunks(logits, largest):
            weights_CV = x_CV.exp()
            sums_2N[0, part] = weights_CV.sum(-1)
            sums_2N[1, part] = weights_CV.mul_(x_CV).sum(-1)
        if group is not None:
            dist.all_reduce(sums_2N, group=group)
        log_z = sums_2N[0].log().view(largest.shape)
        found = log_z - (sums_2N[1] / sums_2N[0]).view(largest.shape)
        ctx.save_for_backward(logits, largest, log_z, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, largest, log_z, found = ctx.saved_tensors
        by_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat_NV = by_logits.view(-1, logits.shape[-1])
        entropy_N1, gradient_N1 = found.reshape(-1, 1), gradient.reshape(-1, 1)
        # By a logit it is -p · (log p + H).
        for part, x_CV in _chunks(logits, largest + log_z):
            torch.exp(x_CV, out=flat_NV[part])
            flat_NV[part].mul_(x_CV.add_(entropy_N1[part])).mul_(-gradient_N1[part])
        return by_logits, None


def _chunks(logits: torch.Tensor, less: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parts of the distributions, counted over all rows, each with its logits less the values of
    `less` `[C, V]`; finite.

    Logits that leave the last token out are a view with gaps between the rows. To flatten it would
    copy all of it, so each part is cut out of the view.
    """
    shape = (logits.shape[:-2].numel(), logits.shape[-2] if logits.dim() > 1 else 1)
    logits_BPV, less_BP1 = logits.reshape(*shape, logits.shape[-1]), less.reshape(*shape, 1)
    tokens = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    rows = max(1, tokens // max(1, shape[1]))
    for row in range(0, shape[0], rows):
        for token in range(0, shape[1], tokens):
            index = slice(row, row + rows), slice(token, token + tokens)
            x_CV = (logits_BPV[index] - less_BP1[index]).flatten(0, 1)
            first = row * shape[1] + token
            # The product of exp(-inf) and -inf is no number.
            yield slice(first, first + len(x_CV)), x_CV.clamp_(min=-1e30)


class _ShardedLogprobs(torch.autograd.Function):
    """Logprob of the chosen tokens: logit minus logsumexp, both all-reduced over the group."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BPW: torch.Tensor,
        tokens_BP: torch.Tensor,
        first_token: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        largest_BP = logits_BPW.amax(-1)
        dist.all_reduce(largest_BP, dist.ReduceOp.MAX, group=group)
        weights_BPW = (logits_BPW - largest_BP[..., None]).exp()
        local_BP = tokens_BP - first_token
        is_own_BP = (local_BP >= 0) & (local_BP < logits_BPW.shape[-1])
        local_BP1 = torch.where(is_own_BP, local_BP, 0)[..., None]
        chosen_BP = torch.where(is_own_BP, logits_BPW.gather(-1, local_BP1)[..., 0], 0.0)
        both_2BP = torch.stack([weights_BPW.sum(-1), chosen_BP])
        dist.all_reduce(both_2BP, group=group)
        probabilities_BPW = weights_BPW.div_(both_2BP[0][..., None])
        ctx.save_for_backward(probabilities_BPW, local_BP1, is_own_BP)
        return both_2BP[1] - largest_BP - both_2BP[0].log()

    @staticmethod
    def backward(ctx: Any, gradient_BP: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities_BPW, local_BP1, is_own_BP = ctx.saved_tensors
        found_BPW = probabilities_BPW * -gradient_BP[..., None]
        found_BPW.scatter_add_(-1, local_BP1, (gradient_BP * is_own_BP)[..., None])
        return found_BPW, None, None, None


def by_token(values_BP: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Per-token numbers `[B, P]` or `[B, P, K]` with column 0; 0 at padding."""
    valid_BP = batch.valid_BL[:, 1:]
    if values_BP.dim() == valid_BP.dim():
        return nn.functional.pad(values_BP * valid_BP, (1, 0))
    return nn.functional.pad(values_BP * valid_BP[..., None], (0, 0, 1, 0))
