"""Request and response bodies of the HTTP API. They go no further than the routes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TenantRequest(_Strict):
    """A tenant to create."""

    name: str = Field(description="letters, digits, '.', '_' and '-'")


class JobRequest(_Strict):
    """A job to submit."""

    job: str = Field(description="id chosen by the client; the same one again is the same job")
    name: str
    tenant: str | None = Field(None, description="for operators: whose job it is")
    controller_timeout_s: float = Field(60.0, gt=0, description="silence until it is detached")
    reattach_timeout_s: float = Field(300.0, ge=0, description="detached until it is cancelled")


class FinishRequest(_Strict):
    """The end of a job."""

    outcome: Literal["completed", "failed", "cancelled"]
    reason: str = ""


class MetricsRequest(_Strict):
    """One row of a job's metrics."""

    step: int
    values: dict[str, float]


class ModelRequest(_Strict):
    """A model: a directory, or an architecture with its configuration."""

    path: str | None = None
    architecture: str | None = None
    config_json: str = "{}"
    vocabulary: str = ""
    seed: int = 0


class DeploymentRequest(_Strict):
    """A deployment to create."""

    name: str
    kind: Literal["train", "rollout"]
    model: ModelRequest
    workers: int = Field(1, ge=1, description="worker processes, one per GPU")
    exclusive: bool = Field(False, description="share the GPUs with nobody")
    backend: str | None = Field(None, description="fsdp for train, torch for rollout")
    max_sequence_tokens: int = Field(512, ge=2)
    max_concurrent_samples: int = Field(256, ge=1)


class ErrorBody(BaseModel):
    """What is wrong, where, and how to mend it."""

    code: str
    message: str
    details: dict[str, Any] = {}


class ErrorResponse(BaseModel):
    """Every error's body."""

    error: ErrorBody
