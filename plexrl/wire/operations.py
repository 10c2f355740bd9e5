"""Operations and their parameters, shared by controller, router, scheduler and worker.

Token arrays are *ragged and packed*: the rows of a batch are concatenated, and a second array has
their lengths. Entry t of a per-token array is for token t, predicted from the tokens before it. So
entry 0 of a row is never used.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypedDict

import msgspec


class OperationKind(StrEnum):
    """What an operation does on its WPG. A controller cannot submit the last three."""

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    ZERO_GRAD = "zero_grad"
    """Drop the accumulated gradients."""
    GENERATE = "generate"
    SAVE_CHECKPOINT = "save_checkpoint"
    LOAD_CHECKPOINT = "load_checkpoint"
    SYNC_WEIGHTS = "sync_weights"
    """On a rollout or forward deployment: pull the weights that a train deployment published."""
    BARRIER = "barrier"
    """Does nothing. When it has finished, all earlier operations have finished."""
    PUBLISH = "publish"
    """On the train deployment: make an immutable version of the parameters available to pulls."""
    OFFLOAD = "offload"
    LOAD = "load"
    SNAPSHOT = "snapshot"
    """Stores the state and leaves it on the device: bounds how much a recovery must replay."""


MUTATING = frozenset(
    {
        OperationKind.FORWARD_BACKWARD,
        OperationKind.OPTIM_STEP,
        OperationKind.ZERO_GRAD,
        OperationKind.LOAD_CHECKPOINT,
        OperationKind.SYNC_WEIGHTS,
    }
)
"""Kinds that change a WPG's state. A recovery replays them in order."""

HALTED = MUTATING | {OperationKind.SAVE_CHECKPOINT, OperationKind.PUBLISH}
"""Kinds that do not run while a failed mutation of their deployment is unacknowledged: they change,
save or publish its state."""

SUPERSEDING = frozenset({OperationKind.LOAD_CHECKPOINT, OperationKind.SYNC_WEIGHTS})
"""Mutating kinds that overwrite the whole state of their WPG: a replay may begin with the last
one."""

USER_KINDS: dict[str, frozenset[OperationKind]] = {
    "train": frozenset(
        {
            OperationKind.FORWARD,
            OperationKind.FORWARD_BACKWARD,
            OperationKind.OPTIM_STEP,
            OperationKind.ZERO_GRAD,
            OperationKind.SAVE_CHECKPOINT,
            OperationKind.LOAD_CHECKPOINT,
            OperationKind.PUBLISH,
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
"""The kinds that a controller may submit, by deployment kind."""


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
    """Divisor of the logits. 0 is greedy."""
    top_p: float = 1.0
    """Tokens are drawn from the smallest set of likeliest tokens whose probabilities sum to this
    value. 1 keeps the whole vocabulary."""
    top_k: int = 0
    """Tokens are drawn from the `top_k` likeliest. 0 keeps the whole vocabulary."""
    seed: int | None = None
    """The same seed, weights and prompts give the same tokens, whatever else the engine runs.
    Absent: the router chooses a seed, and a repeated dispatch reuses it."""
    stop_token_ids: tuple[int, ...] = ()
    """A sample ends with the first of these tokens, which is kept. The model's end token also ends
    a sample, unless `ignore_eos`."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """A sample ends when its last tokens equal one of these sequences."""
    stop_strings: tuple[str, ...] = ()
    """A sample ends with the token that completes one of these texts in the text that it has drawn,
    wherever borders of tokens are. All its tokens are kept."""
    ignore_eos: bool = False
    """The model's end token ends no sample."""
    first_sample: int = 0
    """Number of the first sample in the seed's random streams; the next samples have the next ones.
    Calls with one seed and separate numbers draw what one call would draw."""
    drawn_tokens: int = 0
    """Tokens at the end of the prompts that were drawn earlier, as for a partial sample: its random
    stream continues after them."""
    sampling_logprobs: bool = False
    """Return also the logprob of each drawn token under the policy that drew it: after temperature,
    top_k and top_p."""
    top_logprobs: int = 0
    """Return for each drawn token the ids and logprobs of so many likeliest tokens, of the model's
    own distribution."""
    prompt_logprobs: bool = False
    """Return the logprob of each token of the prompts given those before it, of the model's own
    distribution. The prompts are then computed as a whole, also where the cache has a part."""
    prompt_top_logprobs: int = 0
    """As `top_logprobs`, for each token of the prompts, with their logprobs."""

    @property
    def scores_prompts(self) -> bool:
        """Whether tokens of the prompts get logprobs."""
        return self.prompt_logprobs or self.prompt_top_logprobs > 0

    @property
    def details_tokens(self) -> bool:
        """Whether drawn tokens have more numbers than their logprob."""
        return self.sampling_logprobs or self.top_logprobs > 0


class Params(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """Base of the parameters of an operation. In journals and on the wire the tag, the name of the
    class under the key `type`, tells one from the other."""


class AdamParams(Params, frozen=True, kw_only=True):
    """Parameters of one optimizer step. The controller sets the learning rate of every step."""

    learning_rate: float
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    """`muon` steps the matrices of decoder layers, and AdamW all other parameters."""
    momentum: float | None = None
    """Momentum of SGD (absent: 0) and of Muon (absent: 0.95)."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay: every parameter is first multiplied by 1 - learning_rate ·
    weight_decay."""
    grad_clip_norm: float = 0.0
    """Largest global gradient norm; 0 does not clip."""
    divide_by: float = 1.0
    """The accumulated gradients are divided by this first. With losses that are sums it is the
    number of tokens or rows of all their batches."""


LossName = Literal[
    "cross_entropy",
    "reinforce",
    "importance_sampling",
    "ppo",
    "grpo",
    "dapo",
    "gspo",
    "cispo",
    "dro",
    "decoupled_ppo",
    "custom",
    "value",
]

Reduction = Literal["token_mean", "sequence_mean", "sum", "sequence_sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """The loss that `forward_backward` computes, and its constants.

    Per-token inputs by loss, all float32 `[tokens]`; `mask` weights each token, and 0 drops it:

    =====================  ==================================================================
    cross_entropy          mask
    reinforce              mask, advantages; `ref_logprobs` where `kl_coef` > 0
    importance_sampling    mask, logprobs, advantages
    ppo, grpo, dapo        mask, logprobs, advantages; `ref_logprobs` as above
    gspo, cispo            as ppo
    dro                    mask, logprobs, advantages
    decoupled_ppo          mask, logprobs, prox_logprobs, advantages; `ref_logprobs` as above
    custom                 weights: the loss is -Σ weights·logprob, so `weights` is the negative
                           gradient of the controller's own loss by each token's logprob; with
                           a value head, by each token's value
    value                  mask, returns; `values` with a `value_clip`; for value heads only
    =====================  ==================================================================
    """

    name: LossName
    """Name of the function in `plexrl.losses` that makes this spec."""
    clip_low: float = 0.2
    """See `clip_high`."""
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. DAPO's higher upper bound is 0.28."""
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy ‖ reference) (Schulman 2020)."""
    entropy_coef: float = 0.0
    """Weight of the entropy of each token's distribution, which is subtracted: a positive weight
    keeps the policy from becoming deterministic. Losses with advantages only."""
    beta: float = 0.05
    """dro: weight of half the squared distance of logprob and `logprobs`."""
    weight_cap: float | None = None
    """decoupled_ppo: largest importance weight of a token. Absent: no bound."""
    token_range: tuple[float, float] | None = None
    """decoupled_ppo: a token whose importance weight is outside has weight 0. Absent: none has."""
    sequence_range: tuple[float, float] | None = None
    """decoupled_ppo: all tokens of a row have weight 0 if the geometric mean of the row's
    importance weights is outside. Absent: none have."""
    value_clip: float | None = None
    """value: most that a value may differ from the batch's `values` before its squared error stops
    falling. Absent: no bound."""
    reduction: Reduction | None = None
    """How token losses are reduced. `token_mean`: Σ/Σmask over the batch (the default of
    all but grpo, gspo and custom). `sequence_mean`: mean over rows of each row's token mean (the
    default of grpo and gspo). `sum`: Σ, the default of custom.
    `sequence_sum`: Σ over rows of each row's token mean. Absent: the loss's default."""


LOSS_INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("mask",),
    "reinforce": ("mask", "advantages"),
    "importance_sampling": ("mask", "logprobs", "advantages"),
    "ppo": ("mask", "logprobs", "advantages"),
    "grpo": ("mask", "logprobs", "advantages"),
    "dapo": ("mask", "logprobs", "advantages"),
    "gspo": ("mask", "logprobs", "advantages"),
    "cispo": ("mask", "logprobs", "advantages"),
    "dro": ("mask", "logprobs", "advantages"),
    "decoupled_ppo": ("mask", "logprobs", "prox_logprobs", "advantages"),
    "custom": ("weights",),
    "value": ("mask", "returns"),
}
"""Per-token arrays that each loss needs; `loss_inputs` adds those of its coefficients."""

VALUE_LOSSES = ("value", "custom")
"""Losses of a model with a value head."""

DEFAULT_REDUCTION: dict[str, Reduction] = {
    "cross_entropy": "token_mean",
    "reinforce": "token_mean",
    "importance_sampling": "token_mean",
    "ppo": "token_mean",
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "gspo": "sequence_mean",
    "cispo": "token_mean",
    "dro": "token_mean",
    "decoupled_ppo": "token_mean",
    "custom": "sum",
    "value": "token_mean",
}


def loss_inputs(loss: LossSpec) -> tuple[str, ...]:
    """The per-token arrays that a loss needs with its coefficients."""
    found = LOSS_INPUTS[loss.name]
    if loss.kl_coef > 0:
        found = (*found, "ref_logprobs")
    return found if loss.value_clip is None else (*found, "values")


MICRO_BATCH_TOKENS = 16_384
SHARD_BYTES_MAX = 5_000_000_000


class ForwardBackwardParams(Params, frozen=True, kw_only=True):
    """Parameters of `forward_backward`."""

    loss: LossSpec
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    """Most tokens, including padding, that one rank runs through the model at once."""
    sampled_step: int | None = None
    """Optimizer steps in the oldest weights that drew the batch; None: not known. What is watched
    of the run depends on it, and nothing else."""


class ForwardParams(Params, frozen=True, kw_only=True):
    """Parameters of `forward`."""

    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    entropy: bool = False
    """Return also the entropy in nats of the distribution that each token is predicted from."""
    top_logprobs: int = 0
    """Return also ids and logprobs of so many likeliest tokens at each token."""


class GenerateParams(Params, frozen=True, kw_only=True):
    """Parameters of `generate`."""

    samples_per_prompt: int = 1
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stream: bool | Literal["rows"] = False
    """Deliver tokens while they are drawn, or, with `rows`, each row once when it has ended. The
    final result is the same."""


PROMPT_SAMPLING = ("max_tokens", "first_sample", "drawn_tokens")
"""Arrays int64 `[prompts]` that a `generate` may have beside the prompts. Each replaces the field
of `SamplingParams` with its name; samples of a prompt are numbered from its own `first_sample`."""


class CheckpointParams(Params, frozen=True, kw_only=True):
    """Parameters of `save_checkpoint` and `load_checkpoint`."""

    name: str
    """Directory name among the job's checkpoints: letters, digits, `.`, `_`, `-`."""
    overwrite: bool = False
    """For a save: replace an existing checkpoint with this name."""
    format: Literal["hf", "training", "both"] = "both"
    """For a save: files for `transformers`, files to resume training, or both."""
    dtype: Literal["bfloat16", "float16"] | None = None
    """For a save: dtype of the files for `transformers`. Absent: the weights' own. The files to
    resume training are never cast."""
    shard_bytes_max: int = SHARD_BYTES_MAX
    """For a save: larger files are split."""
    step: int | None = None
    """For a save: the training step, which orders checkpoints for `keep_last` and `keep_every`.
    Absent: the number of operations that changed the state."""
    keep: bool = False
    """For a save: exempt this checkpoint from later `keep_last` and `keep_every`."""
    keep_last: int | None = None
    """For a save: when the checkpoint is complete, delete the job's checkpoints except the newest
    `keep_last`. Without this and `keep_every`, none is deleted."""
    keep_every: int | None = None
    """For a save: as `keep_last`, but keep the checkpoints whose step is a multiple of this."""
    keep_bytes: int | None = None
    """For a save: of those that these keep, delete the oldest until this many bytes are left."""
    keep_prefix: str = ""
    """For a save: `keep_last` and `keep_every` count and delete only checkpoints whose names are
    this and a number, the newest being those that were written last. Empty: all."""
    job: str | None = None
    """For a load: the job that saved the checkpoint, of the same tenant. Absent: this job."""
    optimizer: bool = True
    """For a load on a train deployment: restore the optimizer state too."""


class CheckpointSchedule(Params, frozen=True, kw_only=True):
    """When a train deployment saves checkpoints of itself."""

    every: int
    """Optimizer steps from one checkpoint to the next."""
    keep_last: int | None = None
    """Number of its newest scheduled checkpoints that are kept. None: all."""
    keep_bytes: int | None = None
    """Bytes of its newest ones that are kept. None: any number."""

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is saved after optimizer step `step`."""
        return step > 0 and step % self.every == 0

    def params(self, deployment: str, step: int) -> CheckpointParams:
        """What to save for a deployment of this name in its job. A controller that went back to an
        earlier checkpoint makes the same step again, so an existing one is replaced."""
        prefix = f"{deployment}-step-"
        return CheckpointParams(
            name=f"{prefix}{step}",
            overwrite=True,
            step=step,
            keep_last=self.keep_last,
            keep_bytes=self.keep_bytes,
            keep_prefix=prefix,
        )


class SyncWeightsParams(Params, frozen=True, kw_only=True):
    """Parameters of `sync_weights`."""

    source: str
    """Id of the train deployment whose parameters are pulled."""
    delta: bool | Literal["auto"] = "auto"
    """Transfer only blocks that differ from the version that the rollout has from the same source.
    `auto`: only if that is faster. Within a machine it is slower, because comparing takes longer
    than copying."""
    digest: bool = False
    """Add a digest of the new weights to the result."""
    in_flight: bool = False
    """Do not wait for running generations: they pause between two tokens, and continue with the new
    weights."""
    recompute_kv: bool = True
    """In flight: recompute the KV cache of running generations with the new weights. Otherwise they
    keep their cache, which is faster and further off-policy."""
    published: bool = False
    """Pull the newest version that a `publish` of the source has made, without waiting for the
    source. Without such a version the source publishes its weights first, as it does for other
    syncs."""
    ahead: bool = False
    """Choose the version now and fetch it while the generations before the sync go on; the caller
    stops them when it has arrived. Otherwise the version is chosen when the sync begins."""


PARAMS_BY_KIND: dict[OperationKind, "type[OperationParams]"] = {
    OperationKind.FORWARD: ForwardParams,
    OperationKind.FORWARD_BACKWARD: ForwardBackwardParams,
    OperationKind.OPTIM_STEP: AdamParams,
    OperationKind.GENERATE: GenerateParams,
    OperationKind.SAVE_CHECKPOINT: CheckpointParams,
    OperationKind.LOAD_CHECKPOINT: CheckpointParams,
    OperationKind.SYNC_WEIGHTS: SyncWeightsParams,
}
"""The parameter type of each kind that has parameters."""


OperationParams = (
    ForwardParams
    | ForwardBackwardParams
    | AdamParams
    | GenerateParams
    | CheckpointParams
    | SyncWeightsParams
)

MOVES = frozenset({"load", "offload", "snapshot"})
"""Kinds that move a deployment's state; their run has a single phase."""

Span = tuple[float, float]
"""Start and end, in seconds of the scheduler's clock."""


class TimedRow(TypedDict):
    """The fields of `LoggedOperationView` by which the phases are known."""

    kind: str
    submitted_at: float
    started_at: float | None
    finished_at: float | None
    switch_s: float
    transfer_s: float
    compute_s: float | None


def ended_at(row: TimedRow) -> float:
    """When an operation of the log ended."""
    ended = row["finished_at"]
    assert ended is not None, "the log has finished operations only"
    return ended


def phases(row: TimedRow) -> list[tuple[str, Span]]:
    """Name and span of each phase with a duration above 0, in order.

    The log has only the durations of a run's transfer and computation. The transfer is assumed to
    come first, and the rest of the run is overhead of the control plane. Likewise, context switches
    are assumed to be at the end of the wait.
    """
    submitted, started, finished = row["submitted_at"], row["started_at"], ended_at(row)
    if started is None:
        found = [("queue", (submitted, finished))]
    elif row["kind"] in MOVES:
        found = [("move", (started, finished))]
    else:
        switching = started - row["switch_s"]
        sent = min(started + row["transfer_s"], finished)
        computed = min(sent + (row["compute_s"] or 0.0), finished)
        found = [
            ("queue", (submitted, switching)),
            ("switch", (switching, started)),
            ("transfer", (started, sent)),
            ("compute", (sent, computed)),
        ]
    return [(name, (start, end)) for name, (start, end) in found if end > start]
