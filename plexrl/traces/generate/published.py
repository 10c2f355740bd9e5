"""The published RL profiles as rows of a trace (PlexRL Tab. 1 and §6.3). Pure.

Durations are the paper's: cycle, compute_log_prob, update_actor, sync_weight. The paper reports
neither the jitter of cycles nor the rollout GPUs of a job. Training GPUs are the products of the
parallel sizes of Tab. 1 (DP·CP·PP·TP). Rollout GPUs are chosen so that two jobs on one training
pool save what the paper reports: saved / 2 = training / (training + rollout), so half of the
training GPUs for 7B and 30B, a third for 235B. State is 14 bytes per parameter: bf16 weights,
float32 master weights and the two moments of Adam.
"""

import math
from dataclasses import dataclass
from typing import Any

from plexrl.traces.schema import TraceSegment

STATE_BYTES_PER_PARAMETER = 14
JITTER = 0.15
"""Assumed ratio of standard deviation to mean of a cycle's duration."""


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A class of RL jobs."""

    name: str
    period_s: float
    log_prob_s: float
    update_s: float
    sync_s: float
    parameters: float
    gpus: int
    rollout_gpus: int

    @property
    def busy_s(self) -> float:
        """Seconds of a cycle on training GPUs."""
        return self.log_prob_s + self.update_s + self.sync_s

    def demand(self, *, rollout: float = 1.0, work: float = 1.0) -> dict[str, Any]:
        """The cycle fields of a `TraceJob`, with rollout and training work scaled by these factors
        (a sync moves a constant number of bytes)."""
        rollout_s = rollout * (self.period_s - self.busy_s)
        segments = []
        at_s = rollout_s
        for function, length_s in (
            ("log_prob", work * self.log_prob_s),
            ("update", work * self.update_s),
            ("sync", self.sync_s),
        ):
            at_s, length_s = round(at_s, 3), round(length_s, 3)
            segments.append(TraceSegment(function=function, offset_s=at_s, duration_s=length_s))
            at_s += length_s
        period_s = round(at_s, 3)
        return {
            "model": self.name,
            "period_s": period_s,
            "jitter_s": round(JITTER * period_s, 3),
            "segments": tuple(segments),
            "state_bytes": round(STATE_BYTES_PER_PARAMETER * self.parameters),
        }


MODEL_CLASSES = {
    row[0]: ModelClass(*row)
    for row in (
        # Name; seconds of the cycle, log_prob, update and sync; parameters; GPUs, rollout GPUs.
        ("7B", 289.03, 9.66, 38.08, 9.76, 7.6e9, 8, 4),
        ("30B", 284.80, 19.62, 56.35, 7.57, 30.5e9, 256, 128),
        ("235B", 589.71, 20.11, 82.39, 8.89, 235e9, 384, 128),
    )
}
"""Model classes by name."""


def class_of_size(gpus: int) -> ModelClass:
    """The class assumed for a job of this size in a trace of sizes only (PlexRL §6.3): up to one
    node of 8 GPUs is 7B, two nodes are 30B, more are 235B."""
    return MODEL_CLASSES["7B" if gpus <= 8 else "30B" if gpus <= 16 else "235B"]


def cycles_in(duration_s: float, period_s: float) -> int:
    """Number of RL steps of a job with this duration."""
    return max(1, math.floor(duration_s / period_s + 0.5))
