"""The pace of a worker: how long its steps last on a modelled GPU with a modelled model. Pure.

A pace is written `GPU:MODEL@SCALE`, such as `h800:qwen2.5-14b@0.01`: the times of Qwen2.5-14B on
H800s, a hundred times shorter. With `published` in place of the GPU the model is one of the
published profiles (PlexRL Tab. 1), such as `published:7b@0.01`. `,link=25e9` behind it gives the
bytes per second between a GPU and host memory.

All durations here are unscaled; whoever sleeps multiplies them by `scale`.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from plexrl.errors import InvalidRequestError
from plexrl.latency.costs import QWEN3_30B_A3B, EngineCosts
from plexrl.latency.gpus import GPUS, GPUS_PER_NODE, HOST_LINK, MOVE_FIXED_S, NVME_RATE
from plexrl.latency.models import MODELS, Model
from plexrl.traces.generate.published import MODEL_CLASSES, STATE_BYTES_PER_PARAMETER, ModelClass

PUBLISHED = "published"
"""Stands for the GPU of the published profiles, which the paper does not separate from them."""
LOG_PROB_OPERATIONS, UPDATE_OPERATIONS = 2.0, 6.0
"""Operations by parameter and token of a forward pass, and of a forward and backward pass."""
WEIGHT_BYTES = 2
"""Bytes of a bf16 parameter, in an engine and in a published version."""
SCALE_MIN = 1e-6


class Training(Protocol):
    """Seconds of a trainer's operations; every rank takes part in each."""

    def log_prob_s(self, tokens: int) -> float:
        """A `forward` of a batch of so many tokens."""
        ...

    def update_s(self, tokens: int) -> float:
        """The gradients of a batch of so many tokens."""
        ...

    def step_s(self) -> float:
        """An `optim_step`."""
        ...

    def publish_s(self) -> float:
        """Seconds from the order to publish until the version can be pulled."""
        ...


class Decoding(Protocol):
    """Seconds of one engine's work. `longest` is the length of the longest response among those
    that run, in tokens."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache has room for."""
        ...

    @property
    def kv_admitted(self) -> int:
        """Tokens in the cache up to which a waiting response is admitted."""
        ...

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of a cached token on each GPU; 1 if the cache is not modelled."""
        ...

    def steps_s(self, steps: int, running: int, kv: int, longest: int) -> float:
        """`steps` decode steps of `running` responses with `kv` cached tokens at first."""
        ...

    def steps_within(self, seconds: float, running: int, kv: int, longest: int) -> int:
        """The most decode steps that end within `seconds`."""
        ...

    def prefill_s(self, tokens: int) -> float:
        """The prefill of a prompt."""
        ...

    def pull_s(self) -> float:
        """A weight sync, once the trainer has published."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The modelled hardware and model of a worker."""

    text: str
    """As the user wrote it."""
    modelled: Model | ModelClass
    scale: float
    """Real seconds for each modelled second."""
    link: float
    """Bytes per second between a GPU and host memory, in one direction."""

    def training(self, gpus: int) -> Training:
        """The trainer's operations on so many GPUs."""
        if isinstance(self.modelled, ModelClass):
            return _PublishedTraining(self.modelled)
        return _ModelledTraining(self.modelled, gpus, self.link)

    def decoding(self, tp: int) -> Decoding:
        """The work of an engine of `tp` GPUs.

        Raises:
            InvalidRequestError: the weights do not fit so many GPUs, or these are no node's.
        """
        if isinstance(self.modelled, ModelClass):
            return _PublishedDecoding(self.modelled)
        return _ModelledDecoding(self.modelled.costs(tp), self.modelled.token_bytes // tp)

    def state_bytes(self, kind: str, gpus: int) -> float:
        """Bytes of the state of each GPU: a trainer's is divided over all of its GPUs, an engine's
        over those of a tensor-parallel group."""
        per_parameter = STATE_BYTES_PER_PARAMETER if kind == "train" else WEIGHT_BYTES
        return per_parameter * self.modelled.parameters / gpus

    def move_s(self, nbytes: float, tier: str, workers: int) -> float:
        """A load or an offload of one GPU's `nbytes`, from or to `tier` (`host` or `nvme`). The
        `workers` GPUs of the deployment, on nodes of `GPUS_PER_NODE`, move at once: each over its
        own link, and all of a node over its NVMe."""
        copy_s = nbytes / self.link
        if tier == "nvme":
            copy_s = max(copy_s, nbytes * min(workers, GPUS_PER_NODE) / NVME_RATE)
        return MOVE_FIXED_S + copy_s


def parse_pace(text: str) -> Pace:
    """The pace that a text names.

    Raises:
        InvalidRequestError: the text has another form, or a GPU, model or number that is unknown or
            out of range.
    """
    main, *settings = text.strip().lower().split(",")
    names, at, scale = main.partition("@")
    gpu, colon, model = names.partition(":")
    if not (gpu and colon and model):
        raise _invalid(text, "it has no GPU and model")
    modelled, link = _modelled(text, gpu, model)
    for setting in settings:
        name, _, value = setting.partition("=")
        if name != "link":
            raise _invalid(text, f"{name!r} is no setting of it")
        link = _number(text, value, "link", least=1.0, most=1e15)
    return Pace(
        text=text,
        modelled=modelled,
        scale=_number(text, scale, "the scale", least=SCALE_MIN, most=1.0) if at else 1.0,
        link=link,
    )


def _modelled(text: str, gpu: str, model: str) -> tuple[Model | ModelClass, float]:
    if gpu == PUBLISHED:
        profiles = {name.lower(): each for name, each in MODEL_CLASSES.items()}
        if model not in profiles:
            raise _invalid(text, f"profile {model!r} is unknown: use {', '.join(profiles)}")
        return profiles[model], HOST_LINK
    if gpu not in GPUS:
        raise _invalid(text, f"GPU {gpu!r} is unknown: use {', '.join(GPUS)} or {PUBLISHED}")
    if model not in MODELS:
        raise _invalid(text, f"model {model!r} is unknown: use {', '.join(MODELS)}")
    on_gpu = replace(MODELS[model], gpu=GPUS[gpu])
    return on_gpu, on_gpu.gpu.host_link


def _number(text: str, given: str, name: str, *, least: float, most: float) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise _invalid(text, f"{name} is {given!r}: give a number from {least:g} to {most:g}")
    return value


def _invalid(text: str, cause: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"pace is {text[:80]!r}, and {cause}; write it as GPU:MODEL@SCALE, such as "
        "h800:qwen2.5-14b@0.01",
        parameter="pace",
    )


@dataclass(frozen=True, slots=True)
class _ModelledTraining:
    model: Model
    gpus: int
    link: float

    def log_prob_s(self, tokens: int) -> float:
        return tokens * self.model.train_s_per_token(LOG_PROB_OPERATIONS) / self.gpus

    def update_s(self, tokens: int) -> float:
        return tokens * self.model.train_s_per_token(UPDATE_OPERATIONS) / self.gpus

    def step_s(self) -> float:
        return QWEN3_30B_A3B.train_fixed_s

    def publish_s(self) -> float:
        return WEIGHT_BYTES * self.model.parameters / self.gpus / self.link


@dataclass(frozen=True, slots=True)
class _PublishedTraining:
    """Each call lasts what the profile says of a cycle's, whatever its batch."""

    profile: ModelClass

    def log_prob_s(self, tokens: int) -> float:
        del tokens
        return self.profile.log_prob_s

    def update_s(self, tokens: int) -> float:
        del tokens
        return self.profile.update_s

    def step_s(self) -> float:
        return 0.0

    def publish_s(self) -> float:
        return self.profile.sync_s


@dataclass(frozen=True, slots=True)
class _ModelledDecoding:
    costs: EngineCosts
    kv_token_bytes: int

    @property
    def kv_tokens(self) -> int:
        return self.costs.kv_tokens

    @property
    def kv_admitted(self) -> int:
        return int(self.costs.kv_admitted)

    def steps_s(self, steps: int, running: int, kv: int, longest: int) -> float:
        del longest
        return self.costs.steps_s(steps, running, kv)

    def steps_within(self, seconds: float, running: int, kv: int, longest: int) -> int:
        del longest
        return self.costs.steps_within(seconds, running, kv)

    def prefill_s(self, tokens: int) -> float:
        return self.costs.prefill_s(tokens)

    def pull_s(self) -> float:
        return self.costs.pull_s


@dataclass(frozen=True, slots=True)
class _PublishedDecoding:
    """The longest response of a call lasts what the profile leaves of a cycle for the rollout. The
    profile's sync is the trainer's part, which includes the pull."""

    profile: ModelClass

    @property
    def kv_tokens(self) -> int:
        return 1 << 40

    @property
    def kv_admitted(self) -> int:
        return self.kv_tokens

    @property
    def kv_token_bytes(self) -> int:
        return 1

    def steps_s(self, steps: int, running: int, kv: int, longest: int) -> float:
        del running, kv
        return steps * (self.profile.period_s - self.profile.busy_s) / longest

    def steps_within(self, seconds: float, running: int, kv: int, longest: int) -> int:
        return int(seconds / self.steps_s(1, running, kv, longest))

    def prefill_s(self, tokens: int) -> float:
        del tokens
        return 0.0

    def pull_s(self) -> float:
        return 0.0
