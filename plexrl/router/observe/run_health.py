"""Decides from what a job's operations return whether its run is sick. Pure.

Each figure is a share or a mean over the job's last `WINDOW` calls that have it, so that a warning
ends by itself once the run is well again.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Final

from plexrl.errors import InvalidRequestError
from plexrl.wire.messages.run_views import RunHealthView, RunWarningView

WINDOW: Final = 8
"""Calls over which a figure is taken."""
COUNT_MIN: Final = 16
"""Samples, rows or rewards below which a share says nothing."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One rule: a figure above its `limit` is a warning."""

    limit: float
    text: str
    """The warning; `{value}` and `{limit}` stand for numbers."""
    is_share: bool = True


THRESHOLDS: Final[dict[str, Threshold]] = {
    "kl_same_weights": Threshold(
        0.01,
        "sampler and trainer differ by {value} nats a token with the same weights (limit {limit}): "
        "compare dtypes, prompts and sampling of both",
        is_share=False,
    ),
    "kl_older_weights": Threshold(
        0.1,
        "the trainer is {value} nats a token from the weights that drew the samples (limit "
        "{limit}): sync more often, or lower the learning rate",
        is_share=False,
    ),
    "ended_by_length": Threshold(
        0.5,
        "{value} of the samples end by length (limit {limit}): raise max_tokens, or look whether "
        "the model ends at all",
    ),
    "past_end_token": Threshold(
        0.05,
        "{value} of the samples run through an end token (limit {limit}): add it to "
        "stop_token_ids, or to the model's generation_config.json",
    ),
    "equal_rewards": Threshold(
        0.8,
        "{value} of the trained rows have no advantage, as in groups of equal rewards (limit "
        "{limit}): the prompts are too easy or too hard",
    ),
    "clipped": Threshold(
        0.3,
        "{value} of the tokens are clipped (limit {limit}): lower the learning rate, or make fewer "
        "steps from one batch",
    ),
    "failed_rewards": Threshold(
        0.1, "{value} of the rewards are failures (limit {limit}): see the log of the reward"
    ),
    "old_cache": Threshold(
        0.2,
        "{value} of the samples were continued with a KV cache of earlier weights (limit {limit}): "
        "sync with recompute_kv=True",
    ),
    "not_finite": Threshold(
        0.0,
        "{value} of the last losses and gradient norms are not finite: load an earlier checkpoint, "
        "and lower the learning rate",
    ),
}
"""The rules by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedSamples:
    """A `generate` has finished."""

    samples: int
    """Samples that were not interrupted."""
    by_length: int
    past_end: int
    """Samples with an end token before their last token."""
    old_cache: int
    """Samples that were continued over a sync with the cache of the weights before it."""
    trainer_step: int
    """Optimizer steps in the weights at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A `forward_backward` has finished."""

    loss: float
    tokens: float
    """Tokens that count."""
    rows: int
    """Rows with advantages."""
    flat_rows: int
    """Rows whose advantages are all 0."""
    kl: float | None
    """KL to the policy that drew the tokens; absent: the loss has none."""
    clip_fraction: float | None
    sampled_step: int | None = None
    """Optimizer steps in the oldest weights that drew the batch; None: it does not say it, and
    those of the newest samples count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """An `optim_step` has finished."""

    grad_norm: float
    trainer_step: int | None
    """Absent: the step was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRewards:
    """Rewards have come."""

    total: int
    failed: int


Observation = GeneratedSamples | Trained | Stepped | GivenRewards


@dataclass(slots=True)
class _Mean:
    """A mean over the last calls."""

    sums: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Value times weight, and weight, of each call."""

    def add(self, total: float, weight: float) -> None:
        if weight > 0 and isfinite(total):
            self.sums.append((total, weight))

    @property
    def weight(self) -> float:
        return sum(weight for _, weight in self.sums)

    @property
    def value(self) -> float:
        return sum(total for total, _ in self.sums) / self.weight


class RunHealth:
    """What is seen of one job. `check_invariants` may be called at any time."""

    def __init__(self, limits: Mapping[str, float] | None = None) -> None:
        """`limits` replace those of `THRESHOLDS`."""
        self.limits = {name: rule.limit for name, rule in THRESHOLDS.items()} | dict(limits or {})
        self._means: dict[str, _Mean] = {}
        self._kl: dict[int, _Mean] = {}
        """By the number of optimizer steps by which the samples' weights are older."""
        self._trainer_step: int | None = None
        """None: not known, as after a restart."""
        self._sampled_step: int | None = None
        """Optimizer steps in the weights of the newest samples."""

    def observe(self, seen: Observation) -> None:
        """Take in what an operation returned."""
        match seen:
            case GeneratedSamples():
                self._sampled_step = seen.trainer_step
                for name, count in (
                    ("ended_by_length", seen.by_length),
                    ("past_end_token", seen.past_end),
                    ("old_cache", seen.old_cache),
                ):
                    self._add(name, count, seen.samples)
            case Trained():
                self._add("not_finite", float(not isfinite(seen.loss)), 1)
                self._add("equal_rewards", seen.flat_rows, seen.rows)
                if seen.clip_fraction is not None:
                    self._add("clipped", seen.clip_fraction * seen.tokens, seen.tokens)
                trained, sampled = self._trainer_step, seen.sampled_step
                sampled = self._sampled_step if sampled is None else sampled
                if trained is not None and seen.sampled_step is not None:
                    # Another router saw the steps since, so that their number is not known here.
                    trained = None if seen.sampled_step > trained else trained
                if seen.kl is not None and trained is not None and sampled is not None:
                    behind = max(0, trained - sampled)
                    name = "kl_older_weights" if behind else "kl_same_weights"
                    self._add(name, seen.kl * seen.tokens, seen.tokens)
                    self._kl.setdefault(behind, _Mean()).add(seen.kl * seen.tokens, seen.tokens)
                    while len(self._kl) > WINDOW:
                        del self._kl[max(self._kl)]
            case Stepped():
                self._add("not_finite", float(not isfinite(seen.grad_norm)), 1)
                if seen.trainer_step is not None:
                    self._trainer_step = seen.trainer_step
            case GivenRewards():
                self._add("failed_rewards", seen.failed, seen.total)

    def view(self) -> RunHealthView:
        """The figures, and the warnings in the order of `THRESHOLDS`."""
        figures = {name: mean.value for name, mean in self._means.items() if mean.sums}
        warnings = [
            _warning(name, figures[name], self.limits[name])
            for name in THRESHOLDS
            if figures.get(name, 0.0) > self.limits[name] and self._counts(name)
        ]
        kl = {str(behind): mean.value for behind, mean in sorted(self._kl.items()) if mean.sums}
        return {"watched": True, "warnings": warnings, "figures": figures, "kl": kl}

    def check_invariants(self) -> None:
        """Each share is between 0 and 1, and memory is bounded."""
        for name, mean in self._means.items():
            assert len(mean.sums) <= WINDOW
            if THRESHOLDS[name].is_share and mean.sums:
                assert -1e-9 <= mean.value <= 1 + 1e-9, name
        assert len(self._kl) <= WINDOW

    def _add(self, name: str, total: float, weight: float) -> None:
        self._means.setdefault(name, _Mean()).add(total, weight)

    def _counts(self, name: str) -> bool:
        """Whether enough was seen for a warning."""
        return name == "not_finite" or self._means[name].weight >= COUNT_MIN


def of_critic(seen: Observation) -> Observation:
    """What counts of a critic: only whether its numbers are finite. Its steps and clipped values
    say nothing of the policy."""
    match seen:
        case Stepped():
            return replace(seen, trainer_step=None)
        case Trained():
            return replace(seen, clip_fraction=None, rows=0, flat_rows=0, kl=None)
        case _:
            return seen


def check_limits(limits: Mapping[str, float]) -> dict[str, float]:
    """The limits that replace those of `THRESHOLDS`. Raises `InvalidRequestError` for others."""
    for name, limit in limits.items():
        if name not in THRESHOLDS:
            known = ", ".join(THRESHOLDS)
            raise InvalidRequestError(f"run_warnings has no threshold {name!r}: it has {known}")
        if not limit >= 0:
            raise InvalidRequestError(f"run_warnings: {name} is {limit}: give 0 or more")
    return dict(limits)


def merge_views(views: list[RunHealthView]) -> RunHealthView:
    """One view from those of several routers, which each saw a part of the operations. Of a figure
    that several have seen, the largest counts."""
    merged: RunHealthView = {"watched": True, "warnings": [], "figures": {}, "kl": {}}
    worst: dict[str, RunWarningView] = {}
    for view in views:
        for name, value in view["figures"].items():
            merged["figures"][name] = max(value, merged["figures"].get(name, value))
        for behind, value in view["kl"].items():
            merged["kl"][behind] = max(value, merged["kl"].get(behind, value))
        for warning in view["warnings"]:
            known = worst.get(warning["code"])
            if known is None or known["value"] < warning["value"]:
                worst[warning["code"]] = warning
    merged["warnings"] = [worst[name] for name in THRESHOLDS if name in worst]
    return merged


def _warning(name: str, value: float, limit: float) -> RunWarningView:
    rule = THRESHOLDS[name]
    form = "{:.0%}" if rule.is_share else "{:.3g}"
    text = rule.text.format(value=form.format(value), limit=form.format(limit))
    return {"code": name, "text": text, "value": value, "threshold": limit}
