"""Ranks of prompts by expected length, as good as a given recall. Pure.

The simulator knows all lengths. The rank of a prompt in its batch becomes a standard normal score
s, and the expected score is r·s + √(1 - r²)·e with noise e of the prompt alone. `correlation` finds
the r with which the longest fifth by expectation has the given part of the longest fifth (StreamRL
Tab. 4). The same r then finds of the longest 10 % and 5 % what the paper measured, within 0.03.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import sqrt
from statistics import fmean

from plexrl.rollout.policies.length_dispatch import LONG_PART
from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.workload import RolloutWorkload, earlier_batch
from plexrl.sim.workload.counter_rng import normals, stream
from plexrl.traces.generate.distributions import STANDARD

POINTS = 1024
"""Points of the numeric integral."""


class ExpectedLengths:
    """Expected tokens of a response to each prompt, as a live rollout's ranker gives them."""

    def __init__(self, workload: RolloutWorkload, prompts: int, recall: float) -> None:
        """`prompts`: of a batch."""
        self._seed = workload.seed
        self._recall = recall
        means = mean_lengths(earlier_batch(workload, prompts))
        self._typical = sorted(means.values())

    def __call__(self, groups: Sequence[Sequence[SimulatedTrajectory]]) -> list[int]:
        """By prompt; the prompts are ranked among each other."""
        means = mean_lengths([each for group in groups for each in group])
        scores = expected_ranks(means, self._recall, self._seed)
        count = len(self._typical)
        return [
            max(1, round(self._typical[int(STANDARD.cdf(scores[group[0].group]) * (count - 1e-9))]))
            for group in groups
        ]


def expected_ranks(lengths: Mapping[int, float], recall: float, seed: int) -> dict[int, float]:
    """An expected score by prompt, from the mean length of its responses; the longest are expected
    to be highest."""
    noise = stream(seed, "rollout ranks")
    shared = correlation(recall)
    own = sqrt(1.0 - shared * shared)
    ordered = sorted(lengths, key=lambda prompt: (lengths[prompt], prompt))
    return {
        prompt: shared * STANDARD.inv_cdf((at + 0.5) / len(ordered))
        + own * normals(noise, prompt)[0]
        for at, prompt in enumerate(ordered)
    }


@lru_cache(maxsize=32)
def correlation(recall: float) -> float:
    """Correlation of expected and true scores with this recall; 0 at that of random ranks."""
    if recall >= 1.0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        low, high = (middle, high) if recall_of(middle) < recall else (low, middle)
    return low


def recall_of(shared: float, part: float = LONG_PART) -> float:
    """Part of the longest that is among those expected to be, for bivariate normal scores of this
    correlation, below 1."""
    least = STANDARD.inv_cdf(1.0 - part)
    own = sqrt(1.0 - shared * shared)
    found = 0.0
    for at in range(POINTS):
        score = STANDARD.inv_cdf(1.0 - part + part * (at + 0.5) / POINTS)
        found += 1.0 - STANDARD.cdf((least - shared * score) / own)
    return found / POINTS


def mean_lengths(trajectories: Sequence[SimulatedTrajectory]) -> dict[int, float]:
    """Mean response length by prompt."""
    found: dict[int, list[int]] = {}
    for trajectory in trajectories:
        found.setdefault(trajectory.group, []).append(trajectory.response_tokens)
    return {prompt: fmean(tokens) for prompt, tokens in found.items()}
