"""Ranks prompts by the expected length of their responses (StreamRL §5.2).

The paper tunes a small language model on pairs of prompt and length. Here it is a ridge regression
of the logarithm of the length on hashed tokens, pairs of neighbouring tokens and the length of the
prompt. It is fitted anew to the latest pairs, in a fraction of a second without a GPU, and the same
pairs in the same order give the same ranker.

A prompt that was generated before, in an earlier epoch, has a history too. What it adds to the
regression is weighed by how much responses to one prompt differ (`within`) and how much prompts
differ beyond what the regression knows (`between`): `between / (between + within / n)` after `n`
responses. Until some prompt has several responses, its history is not used.

Ranks that are little better than chance do harm: a long sample among the many that are thought to
be short ends later than it would by chance. So the ranker says how much it explains.

Lengths grow and shrink as the model learns, those of all prompts together (§5.2). So the regression
learns how far a prompt is from the mean of its time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Tokens = NDArray[np.int32]

HASHED = 256
"""Features of single tokens, and as many of pairs."""
PROMPTS_MIN = 32
"""Least number of different prompts to which a ranker is fitted."""
EXAMPLES_MAX = 4096
"""Latest examples to which a ranker is fitted: a batch of 128 prompts adds 128."""
EXPLAINED_MIN = 0.6
"""Least part of the variance of single lengths that ranks must explain to be used. On simulated
engines ranks that explain 0.63 gain or lose little, and those that explain 0.5 lose
(`benchmarks/rollout_ranker.py` with `VISIBLE` set to 0.7 and 0.55)."""
PERIOD = 256
"""Examples that are of one time."""
RIDGES = (1.0, 10.0, 100.0, 1e3, 1e4)
"""Penalties that are tried. The one with the least error on prompts left out is taken."""
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))


@dataclass(frozen=True, slots=True)
class LengthExample:
    """A prompt, and what its responses were."""

    prompt: Tokens
    """`[tokens]`."""
    lengths: tuple[int, ...]
    """Tokens of each response, one or more."""


def features(prompt: Tokens) -> Floats:
    """The features of a prompt for the regression, `[2 * HASHED + 3]`."""
    tokens = prompt.astype(np.uint64) + np.uint64(1)
    pairs = tokens[:-1] * _ODD[1] + tokens[1:]
    counts = [
        np.bincount(((each * _ODD[0]) >> np.uint64(56)).astype(np.int64), minlength=HASHED)
        for each in (tokens, pairs)
    ]
    size = len(prompt)
    dense = [float(size), np.log1p(size), len(np.unique(prompt)) / max(1, size)]
    found: Floats = np.concatenate([np.log1p(counts[0]), np.log1p(counts[1]), dense])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class LengthRanker:
    """Expected lengths of responses by their prompts."""

    level: float
    """Mean logarithm of the latest lengths."""
    explained: float
    """Part of the variance of the logarithms of lengths that is predicted for prompts that it has
    not learned from: measured on prompts left out, and below 0 if worse than their mean."""
    _mean: Floats
    _scale: Floats
    _weights: Floats
    _known: dict[bytes, tuple[float, float]] = field(default_factory=dict)
    """Expectation for the prompts of the examples, relative to `level`, and what it explains."""

    @property
    def prompts(self) -> int:
        """Number of different prompts that it has learned from."""
        return len(self._known)

    def expected_tokens(self, prompt: Tokens) -> int:
        """Typical length of a response to this prompt, 1 or more."""
        return self._rank(prompt)[0]

    def reliable_tokens(self, prompt: Tokens) -> int:
        """The same, or 0 if less than `EXPLAINED_MIN` is explained for this prompt."""
        tokens, explained = self._rank(prompt)
        return tokens if explained >= EXPLAINED_MIN else 0

    def _rank(self, prompt: Tokens) -> tuple[int, float]:
        known = self._known.get(_key(prompt))
        if known is None:
            found = float((features(prompt) - self._mean) / self._scale @ self._weights)
            known = (found, self.explained)
        return max(1, round(float(np.exp(min(self.level + known[0], 30.0))))), known[1]


def fit(examples: Sequence[LengthExample]) -> LengthRanker | None:
    """A ranker that has learned from the latest `EXAMPLES_MAX` of the examples, oldest first; None:
    they are of fewer than `PROMPTS_MIN` prompts."""
    prompts, level = _by_prompt(examples[-EXAMPLES_MAX:])
    if len(prompts) < PROMPTS_MIN:
        return None
    ys = [np.array(prompt.deviations) for prompt in prompts.values()]
    sizes = np.array([len(lengths) for lengths in ys])
    y = np.array([lengths.mean() for lengths in ys])
    x = np.array([features(prompt.prompt) for prompt in prompts.values()])
    mean = x.mean(axis=0)
    # A feature that no two prompts differ in gets the weight 0.
    scale = np.where(x.std(axis=0) > 1e-9, x.std(axis=0), np.inf)
    weights, left_out = _ridge((x - mean) / scale, y)
    degrees = int((sizes - 1).sum())
    error = float((left_out**2).mean())
    within = error
    if degrees:
        within = sum(float(((lengths - lengths.mean()) ** 2).sum()) for lengths in ys) / degrees
    between = max(0.0, float((left_out**2 - within / sizes).mean()))
    trust = between / np.maximum(between + within / sizes, 1e-12)
    # The regression's expectation without the prompt itself is y - left_out.
    known = y - left_out + trust * left_out
    total = max(float(y.var()) + within * float((1 - 1 / sizes).mean()), 1e-12)
    explained = 1 - (between * (1 - trust) + within) / total
    pairs = zip(known.tolist(), explained.tolist(), strict=True)
    return LengthRanker(
        level=level,
        explained=1.0 - (between + within) / total,
        _mean=mean,
        _scale=scale,
        _weights=weights,
        _known=dict(zip(prompts, pairs, strict=True)),
    )


@dataclass(slots=True)
class _Seen:
    """The responses to one prompt."""

    prompt: Tokens
    deviations: list[float] = field(default_factory=list)
    """Logarithms of their lengths, less the mean of their time."""


def _by_prompt(examples: Sequence[LengthExample]) -> tuple[dict[bytes, _Seen], float]:
    """The examples of each prompt, and the mean logarithm of the latest period."""
    found: dict[bytes, _Seen] = {}
    count, level = max(1, len(examples) // PERIOD), 0.0
    for part in range(count):
        period = examples[part * len(examples) // count : (part + 1) * len(examples) // count]
        logs = [np.log(np.maximum(group.lengths, 1)) for group in period]
        level = float(np.mean([each.mean() for each in logs])) if logs else level
        for each, log in zip(period, logs, strict=True):
            seen = found.setdefault(_key(each.prompt), _Seen(each.prompt))
            seen.deviations += (log - level).tolist()
    return found, level


def _ridge(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Weights `[features]`, and the error for each prompt when it is left out, `[prompts]`.

    `x` `[prompts, features]` and `y` `[prompts]` have mean 0 or almost. The errors are exact: that
    of a ridge regression without one row is its residual over one less the row's leverage.
    """
    y = y - y.mean()
    spectrum, basis = np.linalg.eigh(x.T @ x)
    spectrum = np.maximum(spectrum, 0.0)
    turned = x @ basis
    projected = turned.T @ y
    best: tuple[float, Floats, Floats] | None = None
    for ridge in RIDGES:
        shrunk = 1.0 / (spectrum + ridge)
        leverage = (turned**2) @ shrunk + 1.0 / len(y)
        errors = (y - turned @ (shrunk * projected)) / np.maximum(1.0 - leverage, 1e-6)
        error = float(errors @ errors)
        if best is None or error < best[0]:
            best = (error, basis @ (shrunk * projected), errors)
    assert best is not None
    return best[1], best[2]


def _key(prompt: Tokens) -> bytes:
    return blake2b(np.ascontiguousarray(prompt, dtype=np.int32).tobytes(), digest_size=16).digest()
