"""Request and response bodies of the HTTP API. Only the routes use them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from plexrl.limits import LIMITS, SAMPLES_MAX
from plexrl.model.spec import Head
from plexrl.process.plain_text import is_plain
from plexrl.wire.messages.run_views import SAMPLES_MAX as SAMPLES_KEPT_MAX

SEGMENTS_MAX = 1000
TP_SIZES_MAX = 16


@dataclass(frozen=True, slots=True)
class Limited:
    """For `Annotated`: a number with the bounds of this option of `LIMITS`."""

    group: str
    name: str
    in_query: bool = False
    """A query consists of texts. Elsewhere a text is no number."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        del source, handler  # The bounds know the type.
        bounds = LIMITS[self.group][self.name]
        assert not bounds.may_be_zero, "no field of a request has such bounds"
        options: dict[str, Any] = {"ge": bounds.least, "strict": not self.in_query}
        options["lt" if bounds.is_open else "le"] = bounds.most
        number: CoreSchema = (
            core_schema.int_schema(**options)
            if bounds.is_whole
            else core_schema.float_schema(**options, allow_inf_nan=False)
        )
        if bounds.may_be_absent:
            number = core_schema.nullable_schema(number)
        return core_schema.custom_error_schema(
            number,
            custom_error_type="number",
            custom_error_message=f"it must be {bounds}{bounds.hint}",
        )


Trajectory = Annotated[int, Limited("exchange", "trajectory")]
GradedTrajectory = tuple[
    Trajectory,
    Annotated[int, Limited("exchange", "event")],
    Annotated[float | None, Limited("exchange", "reward")],
    str,
]


def _plain(name: str) -> str:
    if not is_plain(name):
        raise PydanticCustomError(
            "not_plain", "control characters, line ends and text direction marks are not allowed"
        )
    return name


PlainText = Annotated[str, AfterValidator(_plain)]
"""Text that is shown to operators as a name."""

Directory = Annotated[PlainText, Field(pattern="^/", max_length=4096)]
"""An absolute path."""


class Strict(BaseModel):
    """A body without fields of other names."""

    model_config = ConfigDict(extra="forbid")


class ForkRequest(Strict):
    """The job and the step that a fork begins with."""

    job: str
    step: Annotated[int, Limited("fork", "step")]
    settings: dict[str, str | float | bool] = Field(
        default_factory=dict, description="what its controller does differently"
    )


class JobRequest(Strict):
    """A job to submit."""

    job: str = Field(description="id chosen by the client; the same id again is the same job")
    name: PlainText = Field(max_length=200)
    tenant: str | None = Field(None, description="for operators: the tenant that owns the job")
    controller_timeout_s: Annotated[float, Limited("job", "controller_timeout_s")] = Field(
        60.0, description="silence before detachment"
    )
    reattach_timeout_s: Annotated[float, Limited("job", "reattach_timeout_s")] = Field(
        300.0, description="time detached before cancel"
    )
    priority: Annotated[int, Limited("job", "priority")] = Field(
        0,
        description="priority class: a higher class gets GPUs first and runs first",
    )
    gang: Annotated[int, Limited("job", "gang")] = Field(
        0, description="deployments that get GPUs all at once or not at all; 0: one by one"
    )
    expected_s: Annotated[float, Limited("job", "expected_s")] = Field(
        0.0, description="expected length of the job; 0: unknown"
    )
    slo: Annotated[float | None, Limited("job", "slo")] = Field(
        None,
        description="greatest part waiting / (waiting + running) that the job accepts; 0: it "
        "shares GPUs with nobody; null: the tenant's",
    )

    run_warnings: bool | dict[str, float] = Field(
        default=True,
        description="whether the cluster warns of a sick run; limits of warnings by their names",
    )
    quote: dict[str, float] | None = Field(None, description="figures of a quote, to compare")
    fork: ForkRequest | None = Field(None, description="where it comes from")


class FinishRequest(Strict):
    """The end of a job."""

    outcome: Literal["completed", "failed", "cancelled", "detached"]
    reason: str = ""


class MetricsRequest(Strict):
    """One row of a job's metrics."""

    step: Annotated[int, Limited("metrics", "step")]
    values: dict[str, float] = Field(
        description="numbers by name; non-finite ones as `NaN`, `Infinity` or `-Infinity`"
    )


class SampleRequest(Strict):
    """One sample of a step."""

    prompt: str = ""
    text: str
    reward: float | None = Field(description="null: the reward failed")
    length: Annotated[int, Limited("samples", "length")] = Field(description="in tokens")
    ended_by: Literal["stop", "length", "abort"]


class SamplesRequest(Strict):
    """Samples of one step; they replace those that the step has."""

    step: Annotated[int, Limited("samples", "step")]
    total: Annotated[int, Limited("samples", "total")] = Field(
        description="samples of the step, of which the first are given"
    )
    failed: Annotated[int, Limited("samples", "failed")] = Field(
        description="those whose reward failed"
    )
    samples: list[SampleRequest] = Field(max_length=SAMPLES_KEPT_MAX)


class ModelRequest(Strict):
    """A model: a directory, or an architecture with its configuration."""

    path: str | None = None
    architecture: str | None = None
    config_json: str = "{}"
    vocabulary: str = ""
    seed: Annotated[int, Limited("model", "seed")] = 0
    head: Head = "causal"


class SegmentRequest(Strict):
    """One stretch of a cycle in which the deployment uses its GPUs."""

    offset_s: Annotated[float, Limited("segment", "offset_s")] = Field(
        description="from the start of the cycle"
    )
    duration_s: Annotated[float, Limited("segment", "duration_s")]
    slack_s: Annotated[float, Limited("segment", "slack_s")] = Field(
        0.0, description="delay that does not lengthen the cycle"
    )


class TraceRequest(Strict):
    """One cycle of a job on its GPUs, if the user knows it."""

    period_s: Annotated[float, Limited("trace", "period_s")]
    segments: list[SegmentRequest] = Field(
        min_length=1,
        max_length=SEGMENTS_MAX,
        description="ordered by offset, disjoint, inside the period",
    )
    jitter_s: Annotated[float, Limited("trace", "jitter_s")] = Field(
        0.0, description="standard deviation of the cycle's length"
    )


class ParallelismRequest(Strict):
    """Sizes of the axes; they are checked together when the layout is made."""

    dp: Annotated[int, Limited("layout", "dp")] = Field(
        1, description="ranks that get different rows"
    )
    tp: Annotated[int, Limited("layout", "tp")] = Field(1, description="parts of each matrix")
    pp: Annotated[int, Limited("layout", "pp")] = Field(1, description="stages of layers")
    cp: Annotated[int, Limited("layout", "cp")] = Field(1, description="parts of each row")
    ep: Annotated[int, Limited("layout", "ep")] = Field(
        1, description="parts of each layer's experts; divides tp times cp times dp"
    )


class CopyRequest(Strict):
    """A deployment with the settings of another one."""

    name: str = Field(description="unique in its job")


class PauseRequest(Strict):
    """A pause of a rollout's generations."""

    for_s: Annotated[float, Limited("pause", "for_s")] = Field(
        600.0,
        description="time limit of the pause; a second pause restarts it",
    )


class TpRequest(Strict):
    """A size of the tensor-parallel groups of a rollout's engines."""

    tp: Annotated[int, Limited("switch", "tp")] = Field(description="one of `tp_sizes`")
    kv: Literal["migrate", "recompute"] = Field(
        "migrate", description="how unfinished samples get their KV cache in the new groups"
    )


class StopRowsRequest(Strict):
    """Rows of a generation to stop."""

    rows: list[Annotated[int, Limited("stop_rows", "rows")]] = Field(
        min_length=1, max_length=SAMPLES_MAX, description="from 0, over all prompts"
    )


class LoraRequest(Strict):
    """Low-rank adapters; checked against the model when the deployment is made."""

    rank: Annotated[int, Limited("lora", "rank")] = Field(description="rows of A, columns of B")
    alpha: Annotated[float, Limited("lora", "alpha")] = Field(
        16.0, description="B·A is multiplied by alpha / rank"
    )
    targets: list[str] | None = Field(
        None, max_length=100, description="linear layers with adapters; absent: all in a layer"
    )
    seed: Annotated[int, Limited("lora", "seed")] = Field(
        0, description="seed of A's initial values"
    )


class DeploymentRequest(Strict):
    """A deployment to create."""

    name: str
    kind: Literal["train", "forward", "rollout"]
    model: ModelRequest
    workers: Annotated[int | None, Limited("deployment", "workers")] = Field(
        None,
        description="worker processes, one per GPU; absent: as many as the layout has, else 1",
    )
    parallelism: ParallelismRequest | None = Field(
        None, description="the model's layout on the workers; absent: dp over all of them"
    )
    tp_sizes: tuple[Annotated[int, Limited("deployment", "tp_sizes")], ...] = Field(
        (),
        max_length=TP_SIZES_MAX,
        description="rollout: sizes of the tensor-parallel groups between which the engine "
        "switches while it generates, ascending to the layout's tp; empty: always tp",
    )
    exclusive: bool = Field(False, description="do not share the GPUs")
    preemptible: bool = Field(
        default=False,
        description="For a rollout deployment: it uses only the idle time of a group of other "
        "deployments with as many GPUs, and gives way at once. Its generations are continued later",
    )
    shares_gpus: bool | None = Field(
        None,
        description="rollout: share the GPUs with other deployments, as trainings do; absent: the "
        "scheduler decides, and shares them where GPUs are scarce",
    )
    backend: str | None = Field(
        None,
        description="train: fsdp, megatron, deepspeed; forward: torch; rollout: torch, vllm",
    )
    optimizer: Literal["device", "host"] = Field(
        "device",
        description="train: where optimizer state is; host memory keeps it over a context switch",
    )
    dtype: Literal["float32", "bfloat16", "float8_e4m3fn"] = Field(
        "float32",
        description="forward, rollout: dtype of the weights; a sync casts them",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="train: dtype of computation; parameters and steps stay float32"
    )
    activation_checkpointing: bool = Field(
        False, description="train: recompute activations in the backward pass, to save memory"
    )
    reduce_once: bool = Field(
        False,
        description="train: reduce gradients once a call, not for each micro-batch; takes memory",
    )
    max_sequence_tokens: Annotated[int | None, Limited("deployment", "max_sequence_tokens")] = (
        Field(
            None,
            description="longest row; absent: as many tokens as the model has positions, at most "
            "8192, so that a sequence fits into kv_cache_bytes",
        )
    )
    max_concurrent_samples: Annotated[int, Limited("deployment", "max_concurrent_samples")] = 256
    kv_cache_bytes: Annotated[int | None, Limited("deployment", "kv_cache_bytes")] = Field(
        None,
        description="rollout: KV cache of each worker; absent: the engine's own default",
    )
    cuda_graphs: bool = Field(
        default=True, description="rollout: capture decode steps on GPUs as CUDA graphs"
    )
    layers_on_device: Annotated[int | None, Limited("deployment", "layers_on_device")] = Field(
        None,
        description="forward: layers that device memory has room for; the others are in host "
        "memory, and are copied when they run; absent: all are on the device",
    )
    lora: LoraRequest | None = Field(
        None, description="train: adapters on a frozen model; rollout: as its trainer's"
    )
    pace: PlainText = Field(
        "",
        max_length=100,
        description="train, rollout: compute nothing, and make each step last as long as on this "
        "GPU with this model, as h800:qwen2.5-14b@0.01; empty: compute",
    )
    checkpoint_every: Annotated[int | None, Limited("deployment", "checkpoint_every")] = Field(
        None,
        description="train: save a checkpoint NAME-step-N after every so many optimizer steps",
    )
    checkpoint_keep: Annotated[int | None, Limited("deployment", "checkpoint_keep")] = Field(
        None, description="train: keep so many of the newest of them; absent: all"
    )
    checkpoint_bytes: Annotated[int | None, Limited("deployment", "checkpoint_bytes")] = None
    node_type: PlainText = Field("", max_length=100, description="type of the nodes; empty: any")
    trace: TraceRequest | None = Field(
        None, description="its demand as given by the user; it is placed by this at once"
    )


class ErrorBody(BaseModel):
    """What is wrong, where, and how to fix it."""

    code: str
    message: str
    details: dict[str, Any] = {}


class ErrorResponse(BaseModel):
    """Every error's body."""

    error: ErrorBody


class RolloutRequest(Strict):
    """An asynchronous rollout to create. The rollout service checks the values."""

    name: str = Field(description="unique in the job")
    source: str = Field(description="name of the train deployment whose weights are pulled")
    instances: list[str] = Field(description="names of the rollout deployments that generate")
    staleness: Annotated[int, Limited("rollout", "staleness")] = Field(
        description="η: versions by which a trained sample may be old"
    )
    prompts: Annotated[int, Limited("rollout", "prompts")] = Field(
        description="prompts of one batch"
    )
    samples: Annotated[int, Limited("rollout", "samples")] = Field(
        1, description="samples of each prompt"
    )
    sampling: dict[str, Any] = Field(description="as `sampling` of `generate`, with a `seed`")
    over_launch_prompts: Annotated[float, Limited("rollout", "over_launch_prompts")] = Field(
        1.0, description="prompts that a short round starts, as a multiple of `prompts`"
    )
    over_launch_responses: Annotated[float, Limited("rollout", "over_launch_responses")] = Field(
        1.0, description="samples of a prompt that a short round starts, as a multiple of `samples`"
    )
    fixed_over_launch: bool = Field(
        True,
        description="every short round starts so much; false: at most so much, as makes batches "
        "soonest",
    )
    plans_parallelism: bool = Field(
        False, description="divide the instances' GPUs anew between rounds"
    )
    scale_down: bool = Field(
        False, description="half of the instances are freed before a round is complete"
    )
    adaptive_tp: dict[str, Any] | None = Field(
        None,
        description="profile of the engines, by which their tensor-parallel groups change while "
        "the last samples of a batch end",
    )
    length_aware: bool = Field(
        False, description="long samples are generated on instances of their own"
    )
    instances_min: Annotated[int, Limited("rollout", "instances_min")] = Field(
        0, description="least number of instances, with `instances_max`"
    )
    instances_max: Annotated[int, Limited("rollout", "instances_max")] = Field(
        0,
        description="instances are added and removed, up to so many, so that generation takes as "
        "long as training; 0: their number does not change",
    )
    dynamic_sampling: bool = Field(
        False, description="prompts whose rewards are all equal are dropped"
    )
    first_batch: Annotated[int, Limited("rollout", "first_batch")] = Field(
        0, description="number of the first batch"
    )
    failed_prompts_max: Annotated[int, Limited("rollout", "failed_prompts_max")] = Field(
        0,
        description="prompts dropped one after another because of failures after which the rollout "
        "fails; 0: as many as a batch has, and at least 8",
    )


class ExchangeRequest(Strict):
    """Prompts and rewards for an asynchronous rollout."""

    first: Annotated[int, Limited("exchange", "first")] = Field(
        0, description="number of the first of `prompts` in the whole rollout"
    )
    prompts: list[list[Annotated[int, Limited("exchange", "token")]]] = Field(
        [], description="token ids"
    )
    ended: bool = Field(False, description="there are no prompts after these")
    rewards: list[GradedTrajectory] = Field(
        [],
        description="trajectory, its `events` entry, reward (null: it failed, and the group is "
        "dropped), reason",
    )
    after: Annotated[int, Limited("exchange", "after")] = Field(
        0, description="cursor of the latest answer"
    )


class BatchRequest(Strict):
    """A batch to take."""

    trainer_step: Annotated[int, Limited("exchange", "trainer_step")] = Field(
        description="the trainer's steps so far"
    )
    first: Annotated[int, Limited("exchange", "first")] = Field(
        0, description="sample of the batch from which on to return samples"
    )
    seen: list[Trajectory] | None = Field(
        None,
        description="trajectories of the batch that the caller has: the answer has others, as soon "
        "as a prompt is complete; absent: it has the complete batch",
    )
