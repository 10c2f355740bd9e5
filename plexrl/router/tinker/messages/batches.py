"""Batches, prompts and their results, between the Tinker API and PlexRL. Pure.

A datum has inputs x of n tokens, and targets y, where y[i] is predicted from x[0..i]. PlexRL's row
is x and the last target, n + 1 tokens, and the number that belongs to target i is in place i + 1.
So every target but the last is the next input; where a loss counts a target, this is checked.

Losses are sums over tokens, as in the Tinker API: the controller's learning rate, weights and
advantages set the scale. `ratio` is exp(logprob - logprobs), A the advantages.

    cross_entropy         -Σ weights · logprob; weights may be negative
    importance_sampling   -Σ ratio · A
    ppo                   -Σ min(ratio · A, clipped ratio · A)
    cispo                 -Σ clipped ratio · A · logprob, the ratio a constant
    dro                   -Σ (logprob · A - beta / 2 · (logprob - logprobs)²)
    gspo                  ppo with one ratio for each row, exp of its mean log ratio

All but `cross_entropy` count the sampled tokens only: those with an advantage that is not 0, or
with a logprob other than 0 and above `LOGPROB_MIN`; for `gspo` also with `sequence_ratio_mask`
above 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from plexrl.errors import BatchShapeError, ExecutionError, InvalidRequestError
from plexrl.router.tinker.messages.codec import (
    LENGTH,
    STOP,
    Datum,
    SampledRow,
    TopRows,
    TrainBatch,
    sample_output,
    train_output,
)
from plexrl.router.tinker.messages.requests import STABLE_REINFORCE, AsampleRequest
from plexrl.wire.tensors import Array, Arrays

POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")
INPUTS: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens", "weights"),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro", "gspo"), POLICY_INPUTS),
}
"""Inputs of each loss."""
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
}
"""Settings of each loss (`loss_fn_config`) and their defaults."""
MAX_TOKENS = 1 << 30
"""Sent where the client bounds no completion: the deployment's own bound holds."""
LOGPROB_MIN = -80.0
"""A logprob below is no sampled token's: it fills the place of a prompt's token. Its ratio is
infinite in float32."""
TOKENS_MAX = 2**31
"""Token ids are below."""
ABORTED = 2
"""Code of a sample that was interrupted, in results."""


def check_loss(batch: TrainBatch) -> None:
    """Refuse what could not be read, and a loss, a setting or an input that PlexRL does not have.

    Raises:
        InvalidRequestError: names it, and what to write instead.
    """
    if batch.error is not None:
        raise batch.error
    if batch.loss == "stable_reinforce":
        raise InvalidRequestError(STABLE_REINFORCE, parameter="loss_fn")
    if batch.loss not in INPUTS:
        raise InvalidRequestError(
            f"loss_fn={batch.loss!r} is not supported: use one of {', '.join(INPUTS)}, or "
            "forward_backward_custom with a function",
            parameter="loss_fn",
        )
    if batch.forward_only and batch.loss != "cross_entropy":
        raise InvalidRequestError(
            f"forward computes loss_fn='cross_entropy', not {batch.loss!r}: its logprobs do not "
            "depend on the loss",
            parameter="loss_fn",
        )
    unknown = sorted(set(batch.settings) - set(SETTINGS[batch.loss]))
    if unknown:
        raise InvalidRequestError(
            f"loss_fn_config has {unknown[0]!r}, which {batch.loss} does not have: it takes "
            + (", ".join(SETTINGS[batch.loss]) or "none"),
            parameter=unknown[0],
        )
    texts = [name for name, value in batch.settings.items() if isinstance(value, str)]
    if texts:
        raise InvalidRequestError(f"loss_fn_config {texts[0]!r} is a text: give a number")
    if not batch.data:
        raise BatchShapeError("the batch has no rows: send at least one")
    for row, datum in enumerate(batch.data):
        _check_row(batch, row, datum)


def _check_row(batch: TrainBatch, row: int, datum: Datum) -> None:
    wanted = INPUTS[batch.loss]
    optional = {"sequence_ratio_mask"} if batch.loss == "gspo" else set()
    missing = [name for name in wanted if name not in datum.inputs and name != "weights"]
    unknown = sorted(set(datum.inputs) - set(wanted) - optional)
    if missing or unknown:
        found = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which is not used"
        raise BatchShapeError(
            f"row {row} {found}: {batch.loss} takes {', '.join((*wanted, *optional))}",
            row=row,
        )
    for name, array in datum.inputs.items():
        if array.shape != datum.tokens.shape:
            raise BatchShapeError(
                f"{name} of row {row} has {array.size} values, and its input {datum.tokens.size} "
                "tokens: give one value for each token",
                row=row,
            )
    if not datum.tokens.size:
        raise BatchShapeError(f"row {row} has no tokens", row=row)
    targets = datum.inputs["target_tokens"]
    if targets.dtype.kind != "i" or not 0 <= targets[-1] < TOKENS_MAX:
        raise BatchShapeError(
            f"the last target of row {row} is {targets[-1]}: target_tokens are integers, and the "
            f"last one is a token id from 0 to {TOKENS_MAX - 1}",
            row=row,
        )
    if datum.tokens.min() < 0:
        raise BatchShapeError(f"row {row} has a token below 0", row=row)
    differs = targets[:-1] != datum.tokens[1:]
    # Logprobs of targets that do not count are those of the next input token.
    wrong = differs & _counts(batch, datum)[:-1]
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise InvalidRequestError(
            f"target {at} of row {row} is {int(targets[at])}, and the next input token is "
            f"{int(datum.tokens[at + 1])}: PlexRL trains on the input shifted by one token",
            row=row,
            position=at,
        )


def _counts(batch: TrainBatch, datum: Datum) -> Array:
    """Which targets have a part in the loss, bool `[n]`."""
    inputs = datum.inputs
    if batch.loss == "cross_entropy":
        found: Array = _weights(datum) != 0
        return found
    logprobs = inputs["logprobs"]
    is_sampled = (logprobs != 0) & (logprobs > LOGPROB_MIN)
    counted: Array = (inputs["advantages"] != 0) | is_sampled
    if "sequence_ratio_mask" in inputs:
        return counted & (inputs["sequence_ratio_mask"] > 0)
    return counted


def _weights(datum: Datum) -> Array:
    found: Array = datum.inputs.get("weights", np.ones(datum.tokens.shape, np.float32))
    return found


def train_request(batch: TrainBatch) -> tuple[str, dict[str, Any], Arrays]:
    """Kind, parameters and arrays of PlexRL's operation for a checked batch."""
    rows = [np.append(each.tokens, each.inputs["target_tokens"][-1:]) for each in batch.data]
    arrays: Arrays = {
        "tokens": np.concatenate(rows).astype(np.int32),
        "lengths": np.array([row.size for row in rows], np.int32),
    }
    if batch.forward_only:
        return "forward", {}, arrays

    def per_token(value: Callable[[Datum], Array]) -> Array:
        return np.concatenate([np.append(0.0, value(each)) for each in batch.data]).astype(
            np.float32
        )

    if batch.loss == "cross_entropy":
        return (
            "forward_backward",
            {"loss": {"name": "custom"}},
            {**arrays, "weights": per_token(_weights)},
        )
    arrays |= {
        name: per_token(lambda each, name=name: each.inputs[name])  # type: ignore[misc]
        for name in ("logprobs", "advantages")
    }
    mask = per_token(lambda each: _counts(batch, each))
    if not mask.any() and batch.loss not in ("dro", "gspo"):
        # Without an advantage, these losses are 0 in all tokens, whatever their logprobs.
        mask = per_token(lambda each: np.ones(each.tokens.shape))
        arrays["logprobs"] = np.zeros_like(arrays["logprobs"])
    arrays["mask"] = mask
    return "forward_backward", {"loss": _loss(batch)}, arrays


def _loss(batch: TrainBatch) -> dict[str, Any]:
    settings = {**SETTINGS[batch.loss], **batch.settings}
    loss: dict[str, Any] = {"name": batch.loss, "reduction": "sum"}
    if "beta" in settings:
        loss["beta"] = float(settings["beta"])
    if "clip_low_threshold" in settings:
        loss["clip_low"] = 1.0 - float(settings["clip_low_threshold"])
        loss["clip_high"] = float(settings["clip_high_threshold"]) - 1.0
    return loss


def weights_of_forward(batch: TrainBatch) -> list[list[float]]:
    """Weights of a `forward`, from which its loss is computed later."""
    return [_weights(each).tolist() for each in batch.data]


def train_result(
    lengths: Sequence[int],
    weights: Sequence[Sequence[float]] | None,
    metrics: Mapping[str, float | None],
    arrays: Arrays,
) -> bytes:
    """The `ForwardBackwardOutput` of an operation's result. `lengths` are those of PlexRL's rows;
    `weights` are those of a `forward`."""
    ends = np.cumsum(lengths)
    rows = [row[1:] for row in np.split(arrays["logprobs"], ends[:-1])]
    if weights is not None:
        loss = -sum(float(np.dot(w, row)) for w, row in zip(weights, rows, strict=True))
        return train_output(rows, {"loss:sum": loss})
    named = {
        ("loss:sum" if name == "loss" else f"{name}:mean"): float("nan") if value is None else value
        for name, value in metrics.items()
        if name not in ("tokens", "logprob")
    }
    return train_output(rows, named)


def sample_request(asked: AsampleRequest) -> tuple[dict[str, Any], Arrays]:
    """Parameters and arrays of `generate`.

    Raises:
        InvalidRequestError: the prompt is empty, or a number is out of range.
    """
    given_tokens = asked.prompt.tokens
    if not given_tokens or min(given_tokens) < 0 or max(given_tokens) >= TOKENS_MAX:
        raise InvalidRequestError(
            f"the prompt needs token ids from 0 to {TOKENS_MAX - 1}, and at least one"
        )
    tokens = np.array(given_tokens, np.int64)
    last = asked.prompt_logprobs_last_n
    if last is not None and (not asked.prompt_logprobs or last >= tokens.size):
        raise InvalidRequestError(
            f"prompt_logprobs_last_n is {last}: it needs include_prompt_logprobs, and is below the "
            f"prompt's {tokens.size} tokens"
        )
    given = asked.sampling_params
    sampling: dict[str, Any] = {
        "max_tokens": given.max_tokens or MAX_TOKENS,
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": max(given.top_k, 0),
        "top_logprobs": asked.topk_sample_logprobs,
        "prompt_logprobs": bool(asked.prompt_logprobs),
        "prompt_top_logprobs": asked.topk_prompt_logprobs,
    }
    if given.seed is not None:
        sampling["seed"] = given.seed % (1 << 62)
    stop = [given.stop] if isinstance(given.stop, str) else given.stop
    if stop is not None:
        sampling["stop_strings"] = [each for each in stop if isinstance(each, str)]
        sampling["stop_token_ids"] = [each for each in stop if isinstance(each, int)]
        sampling["ignore_eos"] = not stop
    params = {"samples_per_prompt": asked.num_samples, "sampling": sampling}
    return params, {
        "tokens": tokens.astype(np.int32),
        "lengths": np.array([tokens.size], np.int32),
    }


def sample_result(last: int | None, arrays: Arrays) -> bytes:
    """The `SampleResponse` of a `generate` of one prompt; `last` is `prompt_logprobs_last_n`.

    Raises:
        ExecutionError: a sample was interrupted.
    """
    ends = np.cumsum(arrays["lengths"])[:-1]
    parts = {
        name: np.split(arrays[name], ends)
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs")
        if name in arrays
    }
    samples = []
    for row, code in enumerate(arrays["finish"].tolist()):
        if code == ABORTED:
            raise ExecutionError("the sample was interrupted: send the request again")
        top = None
        if "top_ids" in parts:
            top = TopRows(ids=parts["top_ids"][row], logprobs=parts["top_logprobs"][row])
        samples.append(
            SampledRow(
                stop_reason=LENGTH if code else STOP,
                tokens=parts["tokens"][row],
                logprobs=parts["logprobs"][row],
                top=top,
            )
        )
    prompt = arrays.get("prompt_logprobs")
    top_prompt = None
    if "prompt_top_ids" in arrays:
        ids = _suffix(arrays["prompt_top_ids"], last, -1)
        top_prompt = TopRows(ids=ids, logprobs=arrays["prompt_top_logprobs"])
    return sample_output(
        samples, None if prompt is None else _suffix(prompt, last, np.nan), top_prompt
    )


def _suffix(values: Array, last: int | None, blank: float) -> Array:
    """A copy with `blank` in the first place, and in all but the `last` ones."""
    kept = values.copy()
    kept[: 1 if last is None else len(kept) - last] = blank
    return kept
