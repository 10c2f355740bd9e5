"""Reads from the batch and the result of a finished operation what `run_health` needs. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from plexrl.model.text.files import TOKENIZER, end_token_ids, read_object
from plexrl.router.dispatch.reductions import row_masks
from plexrl.router.observe.run_health import GeneratedSamples, Stepped, Trained
from plexrl.wire.tensors import Array, Arrays

SHORT_TOKENS = 16
END_TEXTS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<eos>", "</s>", "<|return|>", "<|end_of_text|>"),
    }
)
"""Tokens that end a turn or a text in published models."""


def end_tokens(files: Mapping[str, str]) -> tuple[int, ...]:
    """Ids of the tokens that end a turn or a text, from a model's text files; also those that its
    `generation_config.json` leaves out."""
    added = read_object(files, TOKENIZER).get("added_tokens", [])
    known = {each["id"] for each in added if each.get("content") in END_TEXTS}
    return tuple(sorted(known | end_token_ids(files)))


def generated(
    arrays: Arrays,
    result: Mapping[str, Any],
    ends: Sequence[int],
    *,
    keeps_cache: bool,
    max_tokens: int,
) -> GeneratedSamples:
    """The figures of a `generate`. `arrays` has `finish` [samples], `lengths` [samples], `tokens`
    [all tokens]; `keeps_cache`: the last sync kept the KV cache of earlier weights. That samples of
    at most `SHORT_TOKENS` end by length says nothing: many tasks have answers of a known length."""
    finish, lengths = arrays["finish"], arrays["lengths"]
    continued = {segment[0] for segment in result.get("segments", ()) if segment[1] > 0}
    return GeneratedSamples(
        samples=int((finish != 2).sum()),
        by_length=int((finish == 1).sum()) if max_tokens > SHORT_TOKENS else 0,
        past_end=_past_end(arrays["tokens"], lengths, finish != 2, ends),
        old_cache=sum(finish[row] != 2 for row in continued) if keeps_cache else 0,
        trainer_step=int(result.get("trainer_step", 0)),
    )


def trained(
    batches: Sequence[Arrays], metrics: Mapping[str, Any], sampled_step: int | None = None
) -> Trained:
    """The figures of a `forward_backward`; `batches` are its rows in parts, and `sampled_step` is
    that of its parameters."""
    rows = flat_rows = 0
    for arrays in batches:
        if "advantages" not in arrays or not len(arrays["lengths"]):
            continue
        lengths, mask = arrays["lengths"], arrays["mask"]
        counted = row_masks(mask, lengths) > 0
        weight = row_masks(np.abs(arrays["advantages"]) * mask, lengths)
        rows += int(counted.sum())
        flat_rows += int((counted & (weight <= 1e-8)).sum())
    return Trained(
        loss=_number(metrics.get("loss")),
        tokens=_number(metrics.get("tokens", 0.0)),
        rows=rows,
        flat_rows=flat_rows,
        kl=_number(metrics["old_kl"]) if "old_kl" in metrics else None,
        clip_fraction=_number(metrics["clip_fraction"]) if "clip_fraction" in metrics else None,
        sampled_step=sampled_step,
    )


def stepped(result: Mapping[str, Any], *, is_refused: bool) -> Stepped:
    """The figures of an `optim_step`. A step is refused if its numbers are not finite."""
    if is_refused:
        return Stepped(grad_norm=math.nan, trainer_step=None)
    metrics = result.get("metrics", {})
    step = result.get("trainer_step")
    return Stepped(
        grad_norm=_number(metrics.get("grad_norm", 0.0)),
        trainer_step=None if step is None else int(step),
    )


def _past_end(tokens: Array, lengths: Array, counted: Array, ends: Sequence[int]) -> int:
    """Number of counted samples with one of `ends` before their last token."""
    if not ends:
        return 0
    hits = tokens == ends[0]
    for end in ends[1:]:
        hits |= tokens == end
    last = np.cumsum(lengths, dtype=np.int64) - 1
    hits[last[lengths > 0]] = False
    rows = np.unique(np.searchsorted(last, np.flatnonzero(hits)))
    return int(counted[rows].sum())


def _number(value: Any) -> float:
    """The number; NaN for what is none, as JSON has no NaN."""
    return float(value) if isinstance(value, int | float) else math.nan
