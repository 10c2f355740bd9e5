"""Prompts and the lengths of their responses.

The lengths of prompt i are the same for every system. If the trace of lengths has several responses
per prompt, a simulated prompt is one of the trace's. Otherwise lengths are drawn by a Gaussian
copula: the normal score of response j to prompt i is √c·a_i + √(1 - c)·b_ij with standard normal a
and b, so that every length has the trace's distribution, and c is the correlation within a prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from plexrl.errors import InvalidRequestError
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.workload.counter_rng import normals, stream, uniform
from plexrl.traces.bundled import bundled
from plexrl.traces.formats import read_histogram
from plexrl.traces.generate.distributions import STANDARD, Distribution, Histogram, Weibull
from plexrl.traces.generate.length_model import fit_lengths
from plexrl.traces.schema import ResponseLength
from plexrl.traces.sources import open_trace

R1 = "r1"
"""All response lengths of the bundled DeepSeek R1 distribution."""
R1_LONG = "r1-long"
"""Its long responses: those beyond the minimum between its two modes."""
DEEPSCALER = "deepscaler"
"""A Weibull distribution of which 10.85 % are above 8192 tokens and 2.18 % above 16 384, as of
LLaMA3.1-8B on DeepScaleR (PAT §2.3). Its mean is 3 400 tokens; that of the paper's steps with at
most 24 576 tokens is 3 445 (3510.9 tokens/s for 125.6 s, §5.3). A lognormal one has 4 000."""
DEEPSCALER_TAIL = {8192: 0.1085, 16_384: 0.0218}
LONG_TOKENS = 2767
"""The minimum between the modes: from here to 18 000 tokens lengths are log-uniform."""
EARLIER = 1 << 24
"""Number of the first prompt that was generated before the training."""
EXTRA_MAX = 1 << 16
"""Most extra responses to a prompt."""
POINTS = 4096
"""Quantiles of a tabulated distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutWorkload:
    """The prompts of a run."""

    lengths: str = R1_LONG
    """`r1`, `r1-long`, `deepscaler` or a trace of response lengths."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Lengths of the responses to each of some prompts, in place of `lengths`: those of a profile.
    A simulated prompt is one of these; with one response each, all are one distribution."""
    scale: float = 1.25
    """Factor on lengths. R1 was served with a limit of 32 000 tokens, of which 40 000 is 1.25."""
    limit: int = 40_000
    """Longest response in tokens; longer ones are cut there."""
    correlation: float = 0.9
    """Correlation of the responses to one prompt, if the trace does not determine it. StreamRL
    Tab. 4 finds up to 87 % of the longest fifth from the prompts alone; at 0.9 a perfect ranker of
    prompts finds 82 %."""
    group_size: int = 16
    prompt_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("limit", 1), ("group_size", 1), ("prompt_tokens", 0)):
            if getattr(self, name) < low:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}: give at least {low}")
        if not 0.0 <= self.correlation <= 1.0:
            raise InvalidRequestError(f"correlation is {self.correlation}: give 0 to 1")
        if not (self.scale > 0.0 and math.isfinite(self.scale)):
            raise InvalidRequestError(f"scale is {self.scale}: give a number above 0")


class Prompts:
    """Draws the trajectories of prompt 0, 1, …"""

    def __init__(self, workload: RolloutWorkload) -> None:
        """Raises:
        InvalidRequestError: the trace of lengths cannot be read or has none.
        """
        self.workload = workload
        self._source = _profiled(workload.groups) if workload.groups else _source(workload.lengths)
        self._prompts = stream(workload.seed, "rollout prompts")
        self._responses = stream(workload.seed, "rollout responses")
        self._extra = stream(workload.seed, "rollout extra responses")

    def group(self, prompt: int, extra: int = 0) -> list[SimulatedTrajectory]:
        """New trajectories for a prompt, `extra` of them beyond the group's size. The others are
        the same without them, except for their numbers."""
        workload = self.workload
        size = workload.group_size + extra
        return [
            SimulatedTrajectory(
                number=prompt * size + at,
                group=prompt,
                prompt_tokens=workload.prompt_tokens,
                response_tokens=min(workload.limit, max(1, round(length * workload.scale))),
            )
            for at, length in enumerate(self._lengths(prompt, extra))
        ]

    def _lengths(self, prompt: int, extra: int) -> list[float]:
        size = self.workload.group_size
        draws = [(self._responses, prompt * size + at) for at in range(size)]
        draws += [(self._extra, prompt * EXTRA_MAX + at) for at in range(extra)]
        if self._source.groups:
            group = self._source.groups[
                int(uniform(self._prompts, prompt) * len(self._source.groups))
            ]
            return [group[int(uniform(*draw) * len(group))] for draw in draws]
        known = self._source.correlation
        correlation = self.workload.correlation if known is None else known
        shared = math.sqrt(correlation) * normals(self._prompts, prompt)[0]
        own = math.sqrt(1.0 - correlation)
        scores = (shared + own * normals(*draw)[0] for draw in draws)
        table = self._source.quantiles
        return [table[int(STANDARD.cdf(score) * (len(table) - 1e-9))] for score in scores]


def earlier_batch(workload: RolloutWorkload, groups: int) -> list[SimulatedTrajectory]:
    """A batch that the model has generated before the training."""
    prompts = Prompts(workload)
    numbers = range(EARLIER, EARLIER + groups)
    return [each for prompt in numbers for each in prompts.group(prompt)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Lengths of a trace."""

    quantiles: tuple[float, ...] = ()
    correlation: float | None = None
    groups: tuple[tuple[float, ...], ...] = ()
    """Lengths by prompt; empty if the trace has no groups."""


@lru_cache(maxsize=8)
def _source(lengths: str) -> _Source:
    if lengths in (R1, R1_LONG):
        histogram = read_histogram(bundled("r1-lengths"))
        if lengths == R1_LONG:
            histogram = Histogram(
                bins=tuple(part for part in histogram.bins if part[0] >= LONG_TOKENS)
            )
        return _Source(quantiles=_tabulate(histogram))
    if lengths == DEEPSCALER:
        return _Source(quantiles=_tabulate(_deepscaler()))
    source = open_trace(lengths)
    if source.table.name != "lengths":
        raise InvalidRequestError(
            f"{lengths} contains {source.table.name}, not response lengths: use {R1!r}, "
            f"{R1_LONG!r}, {DEEPSCALER!r} or a trace of lengths"
        )
    rows = list(source.rows)
    groups = _group(rows)
    if groups:
        return _Source(groups=groups)
    model = fit_lengths(rows)
    return _Source(quantiles=_tabulate(model.fit.distribution), correlation=model.correlation)


def _profiled(groups: tuple[tuple[int, ...], ...]) -> _Source:
    several = tuple(tuple(map(float, group)) for group in groups if len(group) > 1)
    if len(several) > 1:
        return _Source(groups=several)
    return _Source(quantiles=tuple(sorted(float(each) for group in groups for each in group)))


def _deepscaler() -> Weibull:
    (low, low_rate), (high, high_rate) = (
        (tokens, -math.log(part)) for tokens, part in DEEPSCALER_TAIL.items()
    )
    shape = math.log(high_rate / low_rate) / math.log(high / low)
    return Weibull(shape=shape, scale=low / low_rate ** (1.0 / shape))


def _group(rows: Sequence[ResponseLength]) -> tuple[tuple[float, ...], ...]:
    """Lengths of the prompts with several responses, if there are several such prompts."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.group:
            found.setdefault(row.group, []).append(float(row.output_tokens))
    several = [tuple(group) for group in found.values() if len(group) > 1]
    return tuple(several) if len(several) > 1 else ()


def _tabulate(distribution: Distribution) -> tuple[float, ...]:
    """Quantiles at the midpoints of equal parts, so that their mean is the distribution's."""
    return tuple(distribution.quantile((at + 0.5) / POINTS) for at in range(POINTS))
