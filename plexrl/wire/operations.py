"""Operations and their parameters, as controller, router, scheduler and worker all know them.

Token arrays are *ragged and packed*: the rows of a batch laid end to end, with their lengths
beside them. Entry t of a per-token array speaks of token t as predicted from the tokens before it,
so entry 0 of a row is never used.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class OperationKind(StrEnum):
    """What an operation does on its WPG. The last four are PlexRL's own, never a controller's."""

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    ZERO_GRAD = "zero_grad"
    """Drop the gradients that wait for a step."""
    GENERATE = "generate"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"
    SYNC_WEIGHTS = "sync_weights"
    """On a rollout or forward deployment: pull what the train deployment published for it."""
    BARRIER = "barrier"
    """Does nothing, in its turn: finished means everything before it is."""
    PUBLISH = "publish"
    """On the train deployment: put an immutable version of the parameters where others can pull."""
    OFFLOAD = "offload"
    LOAD = "load"
    SNAPSHOT = "snapshot"
    """An offload that leaves the state on the device: bounds how much a recovery must replay."""


MUTATING = frozenset(
    {
        OperationKind.FORWARD_BACKWARD,
        OperationKind.OPTIM_STEP,
        OperationKind.ZERO_GRAD,
        OperationKind.LOAD_CHECKPOINT,
        OperationKind.SYNC_WEIGHTS,
    }
)
"""Kinds that change a WPG's state; these are what a recovery replays, in order."""

HALTED = MUTATING | {OperationKind.SAVE_CHECKPOINT, OperationKind.PUBLISH}
"""Kinds that are not carried out while a failed mutation of their deployment is unacknowledged, for
they change, keep or hand on its state."""

SUPERSEDING = frozenset({OperationKind.LOAD_CHECKPOINT, OperationKind.SYNC_WEIGHTS})
"""Mutating kinds that overwrite all state of their WPG: a replay may begin at the last of them."""

USER_KINDS: dict[str, frozenset[OperationKind]] = {
    "train": frozenset(
        {
            OperationKind.FORWARD,
            OperationKind.FORWARD_BACKWARD,
            OperationKind.OPTIM_STEP,
            OperationKind.ZERO_GRAD,
            OperationKind.SAVE_CHECKPOINT,
            OperationKind.LOAD_CHECKPOINT,
            OperationKind.BARRIER,
        }
    ),
    "forward": frozenset(
        {
            OperationKind.FORWARD,
            OperationKind.LOAD_CHECKPOINT,
            OperationKind.SYNC_WEIGHTS,
            OperationKind.BARRIER,
        }
    ),
    "rollout": frozenset(
        {
            OperationKind.GENERATE,
            OperationKind.LOAD_CHECKPOINT,
            OperationKind.SYNC_WEIGHTS,
            OperationKind.BARRIER,
        }
    ),
}
"""The operations a controller may submit, by deployment kind."""


class OperationState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({OperationState.FINISHED, OperationState.FAILED, OperationState.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How `generate` draws tokens."""

    max_tokens: int = 64
    """Most tokens drawn for one sample."""
    temperature: float = 1.0
    """Logits are divided by it before a token is drawn. 0 is greedy."""
    top_p: float = 1.0
    """Tokens are drawn from the smallest set of the likeliest ones whose probabilities add up to
    this. 1 keeps the whole vocabulary."""
    top_k: int = 0
    """Tokens are drawn from this many of the likeliest. 0 keeps the whole vocabulary."""
    seed: int | None = None
    """Same seed, same weights, same prompts: same tokens, whatever else the engine is running.
    Absent: the router draws one, and a repeated dispatch reuses it."""
    stop_token_ids: tuple[int, ...] = ()
    """A sample ends with the first of these, which is kept. The model's own end token always
    counts, unless `ignore_eos`."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """A sample ends once its last tokens equal one of these."""
    ignore_eos: bool = False
    """The model's own end token ends no sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """One optimizer step (AdamW); the controller sets the learning rate of every step."""

    learning_rate: float
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled: every parameter is first multiplied by 1 - learning_rate · weight_decay."""
    grad_clip_norm: float = 0.0
    """Largest global gradient norm; 0 does not clip."""


LossName = Literal["cross_entropy", "importance_sampling", "ppo", "grpo", "dapo", "custom"]

Reduction = Literal["token_mean", "sequence_mean", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Which loss `forward_backward` computes, and its constants.

    Per-token inputs, by loss (all float32 `[tokens]`; `mask` weights each token, 0 drops it):

    =====================  ==================================================================
    cross_entropy          mask
    importance_sampling    mask, logprobs, advantages
    ppo, grpo, dapo        mask, logprobs, advantages; `ref_logprobs` where `kl_coef` > 0
    custom                 weights: the loss is -Σ weights·logprob, so `weights` is the negative
                           gradient of the controller's own loss by each token's logprob
    =====================  ==================================================================
    """

    name: LossName
    """Made by the function of `plexrl.losses` of that name."""
    clip_low: float = 0.2
    """As `clip_high`."""
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. DAPO's higher upper bound is 0.28."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy ‖ reference) (GRPO)."""
    reduction: Reduction | None = None
    """How tokens become one number. `token_mean`: Σ/Σmask over the batch (cross_entropy,
    importance_sampling, ppo, dapo). `sequence_mean`: mean over rows of each row's token mean
    (grpo). `sum` (custom). Absent: the loss's own, as listed."""


LOSS_INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("mask",),
    "importance_sampling": ("mask", "logprobs", "advantages"),
    "ppo": ("mask", "logprobs", "advantages"),
    "grpo": ("mask", "logprobs", "advantages"),
    "dapo": ("mask", "logprobs", "advantages"),
    "custom": ("weights",),
}
"""Per-token arrays that each loss needs; `ref_logprobs` comes on top where `kl_coef` > 0."""

DEFAULT_REDUCTION: dict[str, Reduction] = {
    "cross_entropy": "token_mean",
    "importance_sampling": "token_mean",
    "ppo": "token_mean",
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "custom": "sum",
}


MICRO_BATCH_TOKENS = 16_384
SHARD_BYTES_MAX = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardParams:
    """Of `forward_backward`."""

    loss: LossSpec
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    """Most tokens, padding included, that one rank runs through the model at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardParams:
    """Of `forward`."""

    micro_batch_tokens: int = MICRO_BATCH_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateParams:
    """Of `generate`."""

    samples_per_prompt: int = 1
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    """Deliver tokens while they are drawn; the final result is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointParams:
    """Of `save_checkpoint` and `load_checkpoint`."""

    name: str
    """A directory name of the job's own checkpoints: letters, digits, `.`, `_`, `-`."""
    overwrite: bool = False
    """For a save: replace an existing checkpoint of that name."""
    format: Literal["hf", "training", "both"] = "both"
    """For a save: what `transformers` loads, what training resumes from, or both."""
    dtype: Literal["bfloat16", "float16"] | None = None
    """For a save: cast what `transformers` loads. Absent: as it is; training always resumes from
    what it had."""
    shard_bytes_max: int = SHARD_BYTES_MAX
    """For a save: a file of more bytes is cut."""
    step: int | None = None
    """For a save: the training step, which orders checkpoints for `keep_last` and `keep_every`.
    Absent: the count of operations that changed the state."""
    keep: bool = False
    """For a save: no later checkpoint's `keep_last` and `keep_every` delete this one."""
    keep_last: int | None = None
    """For a save: once it is whole, delete the job's checkpoints but for the newest so many. Both
    this and `keep_every` absent: delete none."""
    keep_every: int | None = None
    """For a save: as `keep_last`, but for those at a multiple of so many steps."""
    upload: bool = False
    """For a save: upload it to where the cluster's operator has uploads go."""
    job: str | None = None
    """For a load: whose checkpoint (a job of the same tenant). Absent: this job's."""
    optimizer: bool = True
    """For a load on a train deployment: restore the optimizer state too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWeightsParams:
    """Of `sync_weights`."""

    source: str
    """Deployment id of the train deployment whose parameters are wanted."""
    delta: bool | Literal["auto"] = "auto"
    """Bring only blocks that differ from the version that the rollout holds, if it holds one of the
    same source. `auto`: where that is quicker, so not within a machine, where all bytes are copied
    sooner than they are compared."""
    digest: bool = False
    """Have the result say the digest of the weights as they are then."""
    in_flight: bool = False
    """Do not wait for generations under way: they stop between two tokens, and go on with the new
    weights."""
    recompute_kv: bool = True
    """In flight: what such generations have cached is computed anew with the new weights. Otherwise
    they go on with it, which is quicker and further off the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGradParams:
    """A `zero_grad` has no parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierParams:
    """A barrier has no parameters."""


PARAMS_BY_KIND: dict[OperationKind, type] = {
    OperationKind.FORWARD: ForwardParams,
    OperationKind.FORWARD_BACKWARD: ForwardBackwardParams,
    OperationKind.OPTIM_STEP: AdamParams,
    OperationKind.ZERO_GRAD: ZeroGradParams,
    OperationKind.GENERATE: GenerateParams,
    OperationKind.SAVE_CHECKPOINT: CheckpointParams,
    OperationKind.LOAD_CHECKPOINT: CheckpointParams,
    OperationKind.SYNC_WEIGHTS: SyncWeightsParams,
    OperationKind.BARRIER: BarrierParams,
}
"""The parameter type of every kind a controller can submit."""
