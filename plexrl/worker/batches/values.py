"""Values of a batch's own tokens, of the outputs of a value head.

A row's token t has the value of what comes before it: the head's output at token t - 1. That is the
state in which token t is chosen, so values stand where logprobs do, and column 0 is 0.

Shapes: B rows, L tokens of the longest row; T packed tokens.
"""

from typing import Any

import torch

from plexrl.model.spec import ModelSpec
from plexrl.worker.batches.logprobs import (
    TokenValues,
    VocabularyShard,
    Wanted,
    by_token,
    token_values,
)
from plexrl.worker.batches.packing import MicroBatch


def output_name(model: ModelSpec) -> str:
    """Name of the numbers of tokens that a model computes, and of which its losses are functions:
    `logprobs`, or `values` with a value head."""
    return "values" if model.head == "value" else "logprobs"


def outputs_of_tokens(
    model: ModelSpec,
    outputs: Any,
    batch: MicroBatch,
    wanted: Wanted,
    shard: VocabularyShard | None = None,
) -> TokenValues:
    """The numbers of every token, from a model's outputs: logits as in `token_values`, or those of
    a value head `[B, L, 1]`, which every tensor rank has."""
    if model.head != "value":
        return token_values(outputs, batch, wanted, shard)
    return {"values": by_token(values_at_positions(outputs)[:, :-1], batch)}


def values_at_positions(outputs: torch.Tensor) -> torch.Tensor:
    """Float32 `[…]` from a value head's outputs `[…, 1]`."""
    return outputs[..., 0].float()
