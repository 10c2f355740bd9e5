"""What operations answer."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plexrl.client.batch import split_rows
from plexrl.errors import from_wire

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from plexrl.wire.tensors import Arrays

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated sample."""

    tokens: list[int]
    logprobs: "npt.NDArray[np.float32]"
    """Of each token under the model itself, before temperature and truncation."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    weights: tuple[tuple[int, int], ...] = ()
    """(index of the first token, version of the weights) of every stretch of tokens that one
    version drew; more than one where weights were synchronised in flight."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """All samples of a `generate`."""

    samples: list[list[Sample]]
    """`[prompts][samples]`."""
    weights_seq: int
    """Version of the weights as it began: mutations applied to the rollout deployment."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the engine: `preemptions` (of these samples), `kv_cache_bytes` (each worker's budget) and
    `kv_cache_bytes_used_max` (the most in use meanwhile, other generations' included)."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Logprobs of a `forward`."""

    logprobs: list[Any]
    """For each row float32 `[tokens]`; entry 0 is 0."""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """A reward model's scores."""

    scores: "npt.NDArray[np.float32]"
    """`[rows]`, in the batch's order."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a `forward_backward` measured."""

    metrics: dict[str, float]
    """`loss`, `tokens`, and means over tokens of what the loss reports; NaN: not finite."""
    logprobs: list[Any]
    """For each row float32 `[tokens]`, before the step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an `optim_step` measured."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of a streamed generation."""

    prompt: int
    sample: int
    tokens: list[int]
    logprobs: list[float]


Decoder = Callable[[Mapping[str, Any], "Arrays"], Any]
"""From the small result and the arrays to what the caller gets."""


def generate_decoder(samples_per_prompt: int) -> Decoder:
    """Decodes a `generate` result."""

    def decode(result: Mapping[str, Any], arrays: "Arrays") -> GenerateResult:
        lengths = arrays["lengths"].tolist()
        tokens = split_rows(arrays["tokens"], lengths)
        logprobs = split_rows(arrays["logprobs"], lengths)
        weights_seq = int(result["weights_seq"])
        drawn: dict[int, list[tuple[int, int]]] = {}
        for row, start, seq in result.get("segments", ()):
            drawn.setdefault(row, []).append((start, seq))
        rows = zip(tokens, logprobs, arrays["finish"].tolist(), strict=True)
        flat = [
            Sample(t.tolist(), p, FINISH_REASONS[code], tuple(drawn.get(row, [(0, weights_seq)])))
            for row, (t, p, code) in enumerate(rows)
        ]
        groups = [
            flat[start : start + samples_per_prompt]
            for start in range(0, len(flat), samples_per_prompt)
        ]
        return GenerateResult(groups, weights_seq, dict(result.get("metrics", {})))

    return decode


def forward_decoder(lengths: list[int]) -> Decoder:
    """Decodes a `forward` result."""

    def decode(result: Mapping[str, Any], arrays: "Arrays") -> ForwardResult:
        del result
        return ForwardResult(split_rows(arrays["logprobs"], lengths))

    return decode


def decode_scores(result: Mapping[str, Any], arrays: "Arrays") -> ScoreResult:
    """Decodes the `forward` of a reward model."""
    del result
    return ScoreResult(arrays["scores"])


def train_decoder(lengths: list[int]) -> Decoder:
    """Decodes a `forward_backward` result."""

    def decode(result: Mapping[str, Any], arrays: "Arrays") -> TrainResult:
        # JSON has no number for what is not finite: there is null in its place.
        metrics = {n: math.nan if v is None else v for n, v in result["metrics"].items()}
        return TrainResult(metrics, split_rows(arrays["logprobs"], lengths))

    return decode


def decode_step(result: Mapping[str, Any], arrays: "Arrays") -> StepResult:
    """Decodes an `optim_step` result; a step that dropped its gradients raises its error."""
    del arrays
    if "error" in result:
        raise from_wire(result["error"])
    return StepResult(dict(result["metrics"]))


def decode_plain(result: Mapping[str, Any], arrays: "Arrays") -> dict[str, Any]:
    """Decodes results that are small values only."""
    del arrays
    return dict(result)
