"""Views of what a job's run shows: its samples, and warnings that it is sick."""

from typing import NotRequired, TypedDict

from plexrl.ids import JobId, TenantId

SAMPLES_MAX = 64
"""Most samples of a step that are kept."""
CHARACTERS_MAX = 4000
"""Most characters of a prompt or of a text that are kept."""
STEPS_MAX = 1000
"""Most steps of a job whose samples are kept, the newest ones."""


class SampleView(TypedDict):
    """One sample that a controller logged."""

    prompt: str
    """Its beginning, of `CHARACTERS_MAX` characters; empty: not given."""
    text: str
    """Its beginning, likewise."""
    reward: float | None
    """None: there is none, because the reward failed."""
    length: int
    """Tokens."""
    ended_by: str
    """As `Sample.finish_reason`."""


class StepSamples(TypedDict):
    """Samples of one step."""

    step: int
    time: float
    """Seconds since the epoch."""
    total: int
    """Samples of the step; the first `SAMPLES_MAX` are kept."""
    samples: list[SampleView]


class SampledSteps(TypedDict):
    """The steps of a job that have samples."""

    steps: list[int]
    """Ascending."""


class RunWarningView(TypedDict):
    """One sign that a job's run is sick."""

    code: str
    """The threshold that is exceeded."""
    text: str
    """What is seen, and what to look at."""
    value: float
    threshold: float


class RunHealthView(TypedDict):
    """What the cluster sees of a job's run."""

    watched: bool
    """Whether the job has `run_warnings`."""
    warnings: list[RunWarningView]
    figures: dict[str, float]
    """The value beside each threshold, over the last calls; only those that were seen."""
    kl: dict[str, float]
    """Mean KL from sampler to trainer, in nats per token, by the number of optimizer steps by which
    the sampler's weights are older."""


class LoggedRow(TypedDict):
    """The answer to a row of metrics."""

    warnings: NotRequired[list[RunWarningView]]


class QuotedJobView(TypedDict):
    """What one job was quoted, and what came of it. Seconds count from its submission; None: it has
    not happened yet."""

    tenant: TenantId
    job: JobId
    name: str
    state: str
    quoted_start_s: float
    quoted_end_s: float
    quoted_end_low_s: float
    """It ends between this and `quoted_end_high_s` in 80 % of the cases."""
    quoted_end_high_s: float
    quoted_gpu_hours: float
    start_s: float | None
    end_s: float | None
    gpu_hours: float
    """Billed so far."""


class ForkView(TypedDict):
    """Where a job comes from."""

    job: str
    """Id of the job whose checkpoints it began with."""
    step: int
    """Optimizer steps in them."""
    settings: dict[str, str | float | bool]
    """What its controller does differently, by names of the controller's own."""
