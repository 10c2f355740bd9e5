"""What a training cycle takes: published means, and draws around them.

The means are those of PlexRL's evaluation (cycle / log_prob / update / sync seconds); the rollout
is what the rest of a cycle leaves. Draws are lognormal with mean 1. The training work of a cycle
goes with the tokens that its rollout drew, so both factors share part of their randomness, and the
number of tokens is known when the work is submitted.
"""

import math
from dataclasses import dataclass
from random import Random

from plexrl.sim.workload.counter_rng import lognormal
from plexrl.sim.workload.cycles import TOKENS
from plexrl.traces.generate.published import MODEL_CLASSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One drawn training cycle, in seconds of undisturbed work."""

    rollout_s: float
    log_prob_s: float
    update_s: float
    sync_s: float
    tokens: int
    """Drawn by the rollout: the size of the training work."""

    @property
    def group_s(self) -> float:
        """Seconds that it needs the node group."""
        return self.log_prob_s + self.update_s + self.sync_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """A kind of job."""

    rollout_s: float
    log_prob_s: float
    update_s: float
    sync_s: float
    state_bytes: int = 1 << 30
    load_s: float = 4.0
    offload_s: float = 4.0
    rollout_sigma: float = 0.0
    """Of the logarithm of a rollout's seconds; 0: every rollout is the mean."""
    train_sigma: float = 0.0
    """Of the logarithm of a cycle's tokens."""
    shared_draw: float = 0.5
    """Correlation of the two: long rollouts have many tokens."""
    controller_s: float = 0.01
    """From the answer to an operation to the submission of the next."""

    @property
    def cycle_s(self) -> float:
        """Of a mean cycle, the controller's own time apart."""
        return self.rollout_s + self.log_prob_s + self.update_s + self.sync_s

    def draw(self, random: Random) -> Cycle:
        """The next cycle."""
        common, own = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0)
        mixed = self.shared_draw * common + math.sqrt(1.0 - self.shared_draw**2) * own
        work = lognormal(self.train_sigma, common)
        return Cycle(
            rollout_s=self.rollout_s * lognormal(self.rollout_sigma, mixed),
            log_prob_s=self.log_prob_s * work,
            update_s=self.update_s * work,
            sync_s=self.sync_s,
            tokens=max(1, round(TOKENS * work)),
        )

    def alone_s(self, cycle: Cycle) -> float:
        """Seconds of `cycle` on a group that the job has to itself."""
        return cycle.rollout_s + cycle.group_s + CONTROLLER_STEPS * self.controller_s


CONTROLLER_STEPS = 3
"""Submissions of a cycle that the controller makes on an answer: update, sync, next rollout."""

PUBLISHED = tuple(MODEL_CLASSES)
"""Names of the published profiles."""


def published(name: str, *, sigma: float = 0.0, switch_s: float = 8.0) -> JobProfile:
    """The profile of that name, with lognormal draws and a context switch of this length."""
    known = MODEL_CLASSES[name]
    return JobProfile(
        rollout_s=known.period_s - known.log_prob_s - known.update_s - known.sync_s,
        log_prob_s=known.log_prob_s,
        update_s=known.update_s,
        sync_s=known.sync_s,
        load_s=switch_s / 2,
        offload_s=switch_s / 2,
        rollout_sigma=sigma,
        train_sigma=sigma,
    )
