"""Training of prompts that are complete, on GPUs that a rollout has freed (Flexes §4.4). Pure.

Gradients add up, and no parameter changes before the round is complete, so that what is trained
early is only missing from the training step. Tokens are trained as they come, at the rate of the
freed GPUs.
"""

import math


class StreamTrainer:
    """The tokens of one round: those that are complete, and those that are trained early."""

    def __init__(self, gpu_s_per_token: float) -> None:
        self._gpu_s_per_token = gpu_s_per_token
        self._gpus = 0
        self._at_s = 0.0
        self._waiting = 0.0
        self._done = 0.0

    def free(self, gpus: int, now: float) -> None:
        """So many GPUs train from now on."""
        self._advance(now)
        self._gpus = gpus

    def complete(self, tokens: int, now: float) -> None:
        """A prompt is complete, with so many tokens of prompt and responses."""
        self._advance(now)
        self._waiting += tokens

    def end(self, now: float) -> float:
        """The round is complete. Returns the tokens that are trained, and begins the next round."""
        self._advance(now)
        done = self._done
        self._gpus = 0
        self._waiting = self._done = 0.0
        return done

    def _advance(self, now: float) -> None:
        if self._gpus and self._waiting:
            can_s = max(0.0, now - self._at_s)
            most = can_s * self._gpus / self._gpu_s_per_token if self._gpu_s_per_token else math.inf
            tokens = min(self._waiting, most)
            self._waiting -= tokens
            self._done += tokens
        self._at_s = max(self._at_s, now)
