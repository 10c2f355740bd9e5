"""Results of operations."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

from plexrl.client.data.batch_rows import split_rows
from plexrl.errors import from_wire

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from plexrl.wire.tensors import Arrays

FINISH_REASONS = ("stop", "length", "abort")
SHOWN_TOKENS = 6
"""Tokens of a sample that its repr shows."""


class WeightsSpan(NamedTuple):
    """Consecutive tokens of a sample that one version of the weights drew."""

    start: int
    """Index of the first token in the sample's `tokens`; the next span's start ends the span."""
    version: int
    """Version of the weights: the number of syncs and loaded checkpoints of the rollout deployment,
    including the last. 0: the model that it was created with."""
    trainer_step: int
    """Optimizer steps of the trainer in these weights: k after the trainer's k-th applied
    `optim_step`. 0: no step, or the rollout deployment was never synced. A loaded checkpoint has
    the step at which it was saved."""


class TopLogprobs(NamedTuple):
    """The likeliest tokens in the place of each token of a row, under the model itself."""

    ids: "npt.NDArray[np.int32]"
    """int32 `[tokens, k]`, the likeliest first. The row's own token may be another one."""
    logprobs: "npt.NDArray[np.float32]"
    """float32 `[tokens, k]`."""


@dataclass(frozen=True, slots=True, repr=False)
class Sample:
    """One generated sample."""

    tokens: list[int]
    """Drawn token ids, without the prompt; a drawn end token is the last."""
    logprobs: "npt.NDArray[np.float32]"
    """float32 `[tokens]`: logprob of each token under the model itself, before temperature and
    truncation."""
    finish_reason: str
    """`stop`: an end token or a stop sequence was drawn. `length`: `max_tokens` or the deployment's
    `max_sequence_tokens` was reached. `abort`: the sample was interrupted, or its deadline passed.
    """
    weights: tuple[WeightsSpan, ...] = ()
    """The weights that drew the tokens: one `WeightsSpan`, or several in order if weights were
    synced in flight."""
    sampling_logprobs: "npt.NDArray[np.float32] | None" = None
    """float32 `[tokens]`: logprob of each token under the policy that drew it, after temperature,
    `top_k` and `top_p`; 0 at temperature 0. None: `SamplingParams` did not ask for it."""
    top_logprobs: TopLogprobs | None = None
    """Likeliest tokens in the place of each of `tokens`. None: not asked for."""

    @property
    def trainer_step(self) -> int:
        """Optimizer steps of the trainer in the weights that drew the first token.

        These are the oldest weights in the sample, so the sample is off-policy by
        `step - sample.trainer_step` steps. `weights` has the step of every token.
        """
        return self.weights[0].trainer_step if self.weights else 0

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.tokens[:SHOWN_TOKENS]))
        more = len(self.tokens) - SHOWN_TOKENS
        return (
            f"Sample(tokens=[{shown}{f', … {more} more' if more > 0 else ''}], "
            f"finish_reason={self.finish_reason!r}, trainer_step={self.trainer_step})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class GenerateResult:
    """All samples of a `generate`."""

    samples: list[list[Sample]]
    """`[prompts][n]`, in the order of the prompts."""
    weights_seq: int
    """Version of the weights at the start, as `WeightsSpan.version`."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the engine: `preemptions` (of these samples), `kv_cache_bytes` (each worker's
    budget) and `kv_cache_bytes_used_max` (largest use meanwhile, other generations included)."""
    trainer_step: int = 0
    """Optimizer steps of the trainer in the weights at the start, as `WeightsSpan.trainer_step`."""
    prompt_logprobs: "list[npt.NDArray[np.float32]] | None" = None
    """For each prompt float32 `[tokens]`: the logprob of every token given those before it, under
    the model itself. Entry 0 is 0; NaN if all samples were interrupted before it was computed.
    None: `SamplingParams` did not ask for it."""
    prompt_top_logprobs: list[TopLogprobs] | None = None
    """For each prompt the likeliest tokens in the place of every token, with entry 0, and entries
    that were not computed, of ids -1. None: not asked for."""

    def __repr__(self) -> str:
        samples = [sample for group in self.samples for sample in group]
        tokens = sum(len(sample.tokens) for sample in samples)
        return (
            f"GenerateResult(prompts={len(self.samples)}, samples={len(samples)}, tokens={tokens}, "
            f"trainer_step={self.trainer_step})"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CapturedSegment:
    """The tokens that the model has read and written as one sequence, over all turns that continue
    it."""

    tokens: list[int]
    """All tokens: prompts, drawn tokens, and what was put between them, such as tool output."""
    mask: list[int]
    """For each token, 1 if the model drew it, and 0 otherwise."""
    logprobs: list[float]
    """For each token, its logprob under the model that drew it, in nats; 0 where `mask` is 0."""
    weights: tuple[WeightsSpan, ...] = ()
    """The weights that drew the tokens; `start` is an index in `tokens`."""
    finish_reason: str = ""
    """Why the last turn ended, as `Sample.finish_reason`."""
    operations: tuple[str, ...] = ()
    """Ids of the generations, one for each turn."""

    def __repr__(self) -> str:
        return (
            f"CapturedSegment(tokens={len(self.tokens)}, drawn={sum(self.mask)}, "
            f"finish_reason={self.finish_reason!r}, turns={len(self.operations)})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class ForwardResult:
    """Logprobs of a `forward`, and what else it was asked for; or the values of a critic."""

    logprobs: "list[npt.NDArray[np.float32]]"
    """For each row of the batch, in order, float32 `[tokens]`: the logprob of every token given the
    tokens before it. Entry 0 is 0."""
    entropy: "list[npt.NDArray[np.float32]] | None" = None
    """For each row, float32 `[tokens]`: entropy in nats of the distribution that the token is
    predicted from. Entry 0 is 0. None: not asked for."""
    top_logprobs: list[TopLogprobs] | None = None
    """For each row, the likeliest tokens in the place of every token. Entry 0 is not predicted, and
    has no meaning. None: not asked for."""
    values: "list[npt.NDArray[np.float32]] | None" = None
    """Of a model with a value head: for each row, float32 `[tokens]`, the value of what comes
    before the token, which is the state in which it is chosen. So values stand where logprobs do:
    entry 0 is 0, and the state after the last token has no value. Then `logprobs` has no rows.
    None: the model computes logprobs."""

    def __repr__(self) -> str:
        return f"ForwardResult({_shape(self.logprobs if self.values is None else self.values)})"


@dataclass(frozen=True, slots=True, repr=False)
class ScoreResult:
    """A reward model's scores."""

    scores: "npt.NDArray[np.float32]"
    """float32 `[rows]`, in the batch's order."""

    def __repr__(self) -> str:
        return f"ScoreResult(rows={len(self.scores)})"


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult:
    """Result of a `forward_backward`."""

    metrics: dict[str, float]
    """`loss`, after its reduction; `tokens`, the sum of the mask; and means over these tokens:
    `logprob`; for a policy loss `entropy` of each one's distribution, `ratio` to the policy that
    drew them, `old_kl`, the k3 estimate of the KL to it, and `clip_fraction`; with `kl_coef` also
    `ref_kl`. Of a critic `value` in place of `logprob`, `return`, `squared_error` and
    `clip_fraction`. NaN: not finite."""
    logprobs: "list[npt.NDArray[np.float32]]"
    """For each row of the batch, in order, float32 `[tokens]`: logprobs under the weights before
    the step. Entry 0 is 0."""
    values: "list[npt.NDArray[np.float32]] | None" = None
    """A critic's values, as `ForwardResult.values`, in place of logprobs. None: it is no critic."""

    def __repr__(self) -> str:
        rows = len(self.logprobs if self.values is None else self.values)
        return f"TrainResult(metrics={_shown(self.metrics)}, rows={rows})"


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """Result of an `optim_step`."""

    metrics: dict[str, float]
    """`grad_norm`, the global norm of the gradients before clipping, and `learning_rate`."""
    trainer_step: int = 0
    """Optimizer steps in the weights, including this one. Samples drawn after a sync from here have
    this `trainer_step`."""

    def __repr__(self) -> str:
        return f"StepResult(metrics={_shown(self.metrics)}, trainer_step={self.trainer_step})"


@dataclass(frozen=True, slots=True, repr=False)
class Chunk:
    """Some tokens of a streamed generation."""

    prompt: int
    """Index of the prompt in `generate`'s `prompts`."""
    sample: int
    """Which of the prompt's `n` samples, from 0."""
    tokens: list[int]
    """Tokens drawn since the sample's last chunk."""
    logprobs: list[float]
    """One for each of `tokens`, as `Sample.logprobs`."""

    def __repr__(self) -> str:
        return f"Chunk(prompt={self.prompt}, sample={self.sample}, tokens={len(self.tokens)})"


class SyncReport(TypedDict):
    """Result of a `sync_weights`."""

    bytes_wanted: int
    """Size of the weights, over all ranks of the synced deployment."""
    bytes_moved: int
    """Bytes transferred; fewer with a delta, more after the loss of a source."""
    fraction: float
    """`bytes_moved / bytes_wanted`."""
    way: str
    """`full` or `delta`."""
    sources: dict[str, int]
    """Bytes by transport: `shared_memory`, `tls`, `tcp`, `nixl`."""
    bytes_replicated: int
    """Bytes that the node fetched for a replica of the version, before: with `published`, if its
    ranks together pull more bytes than the version has. 0 if it had the replica or needs none."""
    seconds: float
    """Duration of the pull on the slowest rank."""
    pause_s: float
    """Seconds in which no token could be drawn, on the slowest rank."""
    transfer_s: float
    """Seconds in which the node fetched the version that was read, before the pause if generations
    ran, with `published`. 0: what came over a network came in the pause."""
    tier: str
    """`host` or `nvme`: the tier of the published version."""
    weights_seq: int
    """The version: the count of operations that had changed the trainer's state."""
    trainer_step: int
    """Optimizer steps in it, as `WeightsSpan.trainer_step`."""
    digest: NotRequired[str]
    """With `digest=True`: digest of all weights after the sync."""


class SavedCheckpoint(TypedDict):
    """Result of a `save_checkpoint`."""

    path: str
    """Its directory, on the cluster's nodes."""
    job: str
    name: str
    seq: int
    """The version: the count of operations that had changed the trainer's state."""
    durable: bool
    """Whether the checkpoint is whole and on the disk."""


class LoadedCheckpoint(TypedDict):
    """Result of a `load_checkpoint`."""

    trainer_step: int
    """Optimizer steps in the loaded weights, as `WeightsSpan.trainer_step`."""


Decoder = Callable[[Mapping[str, Any], "Arrays"], Any]
"""Builds a result object from the JSON values and the arrays of a response."""


def generate_decoder(samples_per_prompt: int, prompts: list[int]) -> Decoder:
    """Decodes a `generate` result; `prompts` are the prompts' lengths."""

    def decode(result: Mapping[str, Any], arrays: "Arrays") -> GenerateResult:
        lengths = arrays["lengths"].tolist()
        tokens = split_rows(arrays["tokens"], lengths)
        logprobs = split_rows(arrays["logprobs"], lengths)
        weights_seq = int(result["weights_seq"])
        trainer_step = int(result.get("trainer_step", 0))
        whole = (WeightsSpan(0, weights_seq, trainer_step),)
        drawn: dict[int, list[WeightsSpan]] = {}
        for row, start, seq, step in result.get("segments", ()):
            drawn.setdefault(row, []).append(WeightsSpan(start, seq, step))
        rows = zip(tokens, logprobs, arrays["finish"].tolist(), strict=True)
        drawn_by = _split(arrays, "sampling_logprobs", lengths)
        top = _split_top(arrays, "", lengths)
        flat = [
            Sample(
                t.tolist(),
                p,
                FINISH_REASONS[code],
                tuple(drawn.get(row, whole)),
                drawn_by[row] if drawn_by else None,
                top[row] if top else None,
            )
            for row, (t, p, code) in enumerate(rows)
        ]
        groups = [
            flat[start : start + samples_per_prompt]
            for start in range(0, len(flat), samples_per_prompt)
        ]
        return GenerateResult(
            groups,
            weights_seq,
            dict(result.get("metrics", {})),
            trainer_step,
            _split(arrays, "prompt_logprobs", prompts),
            _split_top(arrays, "prompt_", prompts),
        )

    return decode


def decode_segments(view: Mapping[str, Any]) -> list[CapturedSegment]:
    """The segments of an answer of a router."""
    return [
        CapturedSegment(
            tokens=list(plain["tokens"]),
            mask=list(plain["mask"]),
            logprobs=list(plain["logprobs"]),
            weights=tuple(WeightsSpan(*span) for span in plain["weights"]),
            finish_reason=str(plain["finish_reason"]),
            operations=tuple(plain["operations"]),
        )
        for plain in view["segments"]
    ]


def forward_decoder(lengths: list[int]) -> Decoder:
    """Decodes a `forward` result."""

    def decode(result: Mapping[str, Any], arrays: "Arrays") -> ForwardResult:
        del result
        return ForwardResult(
            _split(arrays, "logprobs", lengths) or [],
            _split(arrays, "entropy", lengths),
            _split_top(arrays, "", lengths),
            _split(arrays, "values", lengths),
        )

    return decode


def _split(
    arrays: "Arrays", name: str, lengths: list[int]
) -> "list[npt.NDArray[np.float32]] | None":
    """An array by rows; None: there is none of this name."""
    return split_rows(arrays[name], lengths) if name in arrays else None


def _split_top(arrays: "Arrays", prefix: str, lengths: list[int]) -> list[TopLogprobs] | None:
    """`<prefix>top_ids` and `<prefix>top_logprobs` by rows; None: there are none."""
    if f"{prefix}top_ids" not in arrays:
        return None
    ids = split_rows(arrays[f"{prefix}top_ids"], lengths)
    logprobs = split_rows(arrays[f"{prefix}top_logprobs"], lengths)
    return [TopLogprobs(*row) for row in zip(ids, logprobs, strict=True)]


def decode_scores(result: Mapping[str, Any], arrays: "Arrays") -> ScoreResult:
    """Decodes the `forward` of a reward model."""
    del result
    return ScoreResult(arrays["scores"])


def train_decoder(lengths: list[int]) -> Decoder:
    """Decodes a `forward_backward` result."""

    def decode(result: Mapping[str, Any], arrays: "Arrays") -> TrainResult:
        # JSON has no number for NaN and infinity; the router sends null.
        metrics = {n: math.nan if v is None else v for n, v in result["metrics"].items()}
        logprobs = _split(arrays, "logprobs", lengths) or []
        return TrainResult(metrics, logprobs, _split(arrays, "values", lengths))

    return decode


def decode_step(result: Mapping[str, Any], arrays: "Arrays") -> StepResult:
    """Decodes an `optim_step` result; raises the error of a step that dropped its gradients."""
    del arrays
    if "error" in result:
        raise from_wire(result["error"])
    return StepResult(dict(result["metrics"]), int(result.get("trainer_step", 0)))


def decode_plain(result: Mapping[str, Any], arrays: "Arrays") -> dict[str, object]:
    """Decodes results without arrays."""
    del arrays
    return dict(result)


def _shape(rows: "list[npt.NDArray[np.float32]]") -> str:
    return f"rows={len(rows)}, tokens={sum(len(row) for row in rows)}"


def _shown(metrics: Mapping[str, float]) -> str:
    return f"{{{', '.join(f'{name!r}: {value:.6g}' for name, value in metrics.items())}}}"
