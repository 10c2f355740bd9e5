"""JSON requests of the Tinker API. A value that PlexRL cannot honour is refused by its name."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from plexrl.errors import InvalidRequestError
from plexrl.limits import SAMPLES_MAX
from plexrl.router.tinker.messages.codec import JsonRequest

STABLE_REINFORCE = (
    "PlexRL does not compute stable_reinforce, whose objective is not published: write "
    'loss_fn="importance_sampling" (or "ppo" for asynchronous rollouts), and '
    "record_stability_info=False"
)
RETRIEVED_MAX = 10_000
"""Samples that the client has, in one poll: each is looked up while other requests wait."""
TTL_S = (3600, 10 * 365 * 86400)
"""Shortest and longest time to live of a checkpoint."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class CreateSession(JsonRequest):
    """A client begins."""

    tags: tuple[str, ...] = ()
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionName(JsonRequest):
    """A heartbeat."""

    session_id: str


class Reason(_Part):
    """Why a session ends."""

    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(JsonRequest):
    """A client ends."""

    reason: Reason = Reason()
    detail: str | None = None


class LoraConfig(_Part):
    """Adapters of a model. Rank 0: all parameters are trained."""

    rank: int = Field(default=32, ge=0)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(_Part):
    """The optimizer of a model."""

    type: str = "adamw"

    @model_validator(mode="after")
    def _is_adam(self) -> "OptimizerConfig":
        if self.type != "adamw":
            raise ValueError(f"{self.type!r} is not supported: use AdamW, the SDK's default")
        return self


class CreateModel(JsonRequest):
    """A model to train."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()


class ModelName(JsonRequest):
    """Names a model."""

    model_id: str


class AdamRequest(_Part):
    """One step of AdamW, with the SDK's defaults."""

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStepRequest(JsonRequest):
    """A step of the optimizer."""

    model_id: str
    seq_id: int
    adam_params: AdamRequest


class SaveWeights(JsonRequest):
    """A checkpoint to resume training from."""

    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = Field(None, ge=TTL_S[0], le=TTL_S[1])
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(JsonRequest):
    """Weights to sample from: with a `path` they are kept, else they are of one sampler."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(None, ge=TTL_S[0], le=TTL_S[1])
    user_metadata: dict[str, str] | None = None


class LoadWeights(JsonRequest):
    """Weights to load into a model, or, with a `session_id`, into a new one."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None


class CreateSampler(JsonRequest):
    """A sampler of a base model or of saved weights."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(_Part):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: tuple[int, ...] = ()


class PromptRequest(_Part):
    """A prompt."""

    chunks: list[PromptChunk]

    @property
    def tokens(self) -> list[int]:
        """All tokens. Raises `InvalidRequestError` for images and audio."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise InvalidRequestError(
                    f"the prompt has a chunk of type {chunk.type!r}: send tokens only"
                )
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(_Part):
    """How tokens are drawn."""

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class AsampleRequest(JsonRequest):
    """Samples of one prompt."""

    sampling_session_id: str | None = None
    seq_id: int | None = None
    num_samples: int = Field(1, ge=1, le=SAMPLES_MAX)
    prompt: PromptRequest
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None

    @model_validator(mode="after")
    def _is_possible(self) -> "AsampleRequest":
        if self.record_stability_info:
            raise ValueError(STABLE_REINFORCE)
        return self


class FutureName(JsonRequest):
    """Names the result of a request."""

    request_id: str
    allow_metadata_only: bool = False


class SamplerTarget(_Part):
    """A sampler, or a clone of it in the client."""

    sampling_session_id: str
    cloned_sampler_id: int = Field(default=0, ge=0)


class FutureNames(JsonRequest):
    """Asks which samples of a sampler have ended."""

    target: SamplerTarget
    prev_cursor: int = Field(default=0, ge=0)
    timeout: float | None = Field(default=None, ge=0)
    """Seconds to wait for one; None: as long as the server holds a poll."""
    retrieved_request_ids: tuple[str, ...] = Field(default=(), max_length=RETRIEVED_MAX)
    """Samples whose results the client has."""


class Ttl(JsonRequest):
    """A checkpoint's time to live; None: it is kept."""

    ttl_seconds: int | None = Field(None, ge=TTL_S[0], le=TTL_S[1])


class PathName(JsonRequest):
    """Names saved weights."""

    tinker_path: str
