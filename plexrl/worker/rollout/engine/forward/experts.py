"""A layer of a Mixture-of-Experts: each token's best experts, by two grouped matrix products.

The rows of all (token, expert) pairs are sorted by expert, so that one grouped product multiplies
each expert's rows by that expert's weights. No step waits for a count on the CPU. Several ranks
divide the experts: each computes the pairs of its own experts, and the sum over ranks follows.

Shapes: T tokens, X hidden, E experts, M an expert's width, K experts per token, R = T·K pairs.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from plexrl.worker.rollout.engine.tensor_parallel import RankGroup

if TYPE_CHECKING:
    from collections.abc import Callable


class Experts:
    """One layer's router and this rank's experts. Keeps views of the parameters, so that weight
    updates reach it."""

    def __init__(self, block: Any, ranks: RankGroup | None = None) -> None:
        """`block` is the sparse block of `transformers`. With `ranks`, it has this rank's share of
        the experts, and only its part of that is computed."""
        router, experts = getattr(block, "router", None) or block.gate, block.experts
        self._router_EX: torch.Tensor = router.weight
        self._router_bias_E: torch.Tensor | None = getattr(router, "bias", None)
        self._per_token: int = router.top_k
        # Mixtral has no such option: it always normalises.
        self._normalizes: bool = getattr(router, "norm_topk_prob", True)

        def own(parameter: Any) -> torch.Tensor:
            kept: torch.Tensor = parameter.data
            return kept if ranks is None else ranks.part_of(kept)

        self._in_EXM, self._out_EMX = own(experts.gate_up_proj), own(experts.down_proj)
        if not experts.is_transposed:
            self._in_EXM, self._out_EMX = self._in_EXM.mT, self._out_EMX.mT
        self._biases: tuple[torch.Tensor, torch.Tensor] | None = None
        if experts.has_bias:
            self._biases = (own(experts.gate_up_proj_bias), own(experts.down_proj_bias))
        self._gated: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate
        count = len(self._in_EXM)
        self._first = 0 if ranks is None else (ranks.share * ranks.splits + ranks.part) * count
        self._has_all = count == len(self._router_EX)
        self._count_E = torch.arange(1, count + 1, device=self._in_EXM.device)

    def __call__(self, inputs_TX: torch.Tensor) -> torch.Tensor:
        """Output `[T, X]` of this rank's experts."""
        weight_TK, expert_TK = self._route(inputs_TX)
        expert_R = expert_TK.reshape(-1)
        if not self._has_all:
            # Pairs of other ranks' experts come last, behind the end of every group.
            own_R = expert_R - self._first
            expert_R = torch.where(
                (own_R >= 0) & (own_R < len(self._count_E)), own_R, len(self._count_E)
            )
        sorted_R, order_R = expert_R.sort(stable=True)
        ends_E = torch.searchsorted(sorted_R, self._count_E, out_int32=True)
        rows_RX = inputs_TX.index_select(0, order_R.div(self._per_token, rounding_mode="floor"))
        both = F.grouped_mm(rows_RX, self._in_EXM, offs=ends_E)
        if self._biases is not None:
            # Rows of other ranks' experts are dropped below, whatever is added to them.
            own_R = sorted_R.clamp(max=len(self._count_E) - 1)
            both += self._biases[0].index_select(0, own_R)
        found_RX = F.grouped_mm(self._gated(both), self._out_EMX, offs=ends_E)
        if self._biases is not None:
            found_RX += self._biases[1].index_select(0, own_R)
        found_RX.mul_(weight_TK.reshape(-1).index_select(0, order_R)[:, None])
        if not self._has_all:
            # Rows behind the last group are not written.
            found_RX.masked_fill_((sorted_R == len(self._count_E))[:, None], 0.0)
        pairs_RX = torch.empty_like(found_RX).index_copy_(0, order_R, found_RX)
        return pairs_RX.view(*expert_TK.shape, -1).sum(1)

    def _route(self, inputs_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts, and the weights of their outputs."""
        logits_TE = F.linear(inputs_TX, self._router_EX, self._router_bias_E)
        score_TE = logits_TE.softmax(-1, dtype=torch.float32)
        weight_TK, expert_TK = score_TE.topk(self._per_token, dim=-1)
        if self._normalizes:
            weight_TK /= weight_TK.sum(-1, keepdim=True)
        return weight_TK.to(inputs_TX.dtype), expert_TK
