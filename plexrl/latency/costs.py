"""Latencies of a rollout instance and of training. Pure.

A decode step of n trajectories with `kv` cached tokens takes `k1·kv + max(k2, k3·n) + k4` seconds
(StaleFlow §5.3, App. B). The defaults are those of Qwen3-30B-A3B (StaleFlow Tab. 4). The paper does
not state the unit of `kv`; here it is the token. With it all coefficients are those of one H20 GPU
per instance: k1 reads the 98 304 bytes of a token at 1.35 TB/s (a third of 4 TB/s), k2 reads the
3.3e9 active parameters at 3.8 TB/s, and k3 computes a token at 53 of 148 TFLOP/s.
"""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Latencies and capacity of one rollout instance, and of training."""

    k1: float = 7.28e-8
    """Seconds of a decode step per cached token."""
    k2: float = 1.72e-3
    """Least seconds of the matrix products of a step."""
    k3: float = 1.25e-4
    """Seconds of the matrix products per trajectory."""
    k4: float = 1.07e-2
    """Constant seconds of a step."""
    kv_tokens: int = 257_000
    """KV cache: 90 % of an H20's 96 GB without the 61.1 GB of bf16 weights, at 98 304 bytes a
    token."""
    kv_reserve: float = 0.01
    """Part of the KV cache that stays free when a waiting trajectory is admitted, as in vLLM."""
    gpus: int = 1
    """GPUs of one instance."""
    prefill_s_per_token: float = 8.9e-5
    """Matrix products of a prefill: 6.6e9 FLOP a token at half of 148 TFLOP/s."""
    prefill_s_per_token2: float = 5.3e-9
    """Attention of a prefill, by the square of the length: 3.9e5 FLOP at half of 148 TFLOP/s."""
    pull_s: float = 7.8
    """Seconds in which an instance receives new parameters (StaleFlow Tab. 3)."""
    push_s: float = 7.8
    """Seconds from the end of a training step until the parameter server has its parameters; the
    paper only says that they overlap with the next step."""
    train_gpu_s_per_token: float = 7.1e-4
    """GPU-seconds of training per token: log-probs, forward and backward pass, 2.64e10 FLOP, and
    0.6 times as many of attention at 10 000 tokens, at 40 % of 148 TFLOP/s."""
    train_fixed_s: float = 5.0
    """Seconds of a training step that do not depend on tokens and GPUs: optimizer, pipeline."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise InvalidRequestError(f"{field.name} is {value!r}: give a number")
            if not math.isfinite(value) or value < 0:
                raise InvalidRequestError(f"{field.name} is {value}: give a number of at least 0")
        if self.kv_reserve >= 1:
            raise InvalidRequestError(f"kv_reserve is {self.kv_reserve}: give a part below 1")
        for name in ("kv_tokens", "gpus"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise InvalidRequestError(f"{name} is {value}: give a whole number above 0")
        if self.k2 + self.k4 <= 0:
            raise InvalidRequestError("k2 and k4 are 0: a decode step takes time; raise one")

    @property
    def kv_admitted(self) -> float:
        """Tokens in the KV cache up to which a waiting trajectory is admitted."""
        return self.kv_tokens * (1.0 - self.kv_reserve)

    def step_s(self, running: int, kv: int) -> float:
        """Seconds of the next decode step of `running` trajectories with `kv` cached tokens."""
        return self.k1 * kv + max(self.k2, self.k3 * running) + self.k4

    def steps_s(self, steps: int, running: int, kv: int) -> float:
        """Seconds of `steps` decode steps; each adds one token per trajectory to the cache."""
        grown = self.k1 * running * (steps * (steps - 1) / 2.0)
        return steps * self.step_s(running, kv) + grown

    def steps_within(self, seconds: float, running: int, kv: int) -> int:
        """The most decode steps that end within `seconds`."""
        half = self.k1 * running / 2.0
        linear = self.step_s(running, kv) - half
        if half > 0.0:
            root = math.sqrt(linear * linear + 4.0 * half * seconds)
            # The stable form of the positive root of half·m² + linear·m = seconds.
            steps = int(2.0 * seconds / (linear + root))
        else:
            steps = int(seconds / linear)
        while self.steps_s(steps + 1, running, kv) <= seconds:
            steps += 1
        while steps and self.steps_s(steps, running, kv) > seconds:
            steps -= 1
        return steps

    def prefill_s(self, tokens: int) -> float:
        """Seconds of the prefill of one trajectory of this length."""
        return tokens * (self.prefill_s_per_token + self.prefill_s_per_token2 * tokens)

    def throughput(self, running: int, kv: int) -> float:
        """Tokens per second at this load."""
        return running / self.step_s(running, kv)

    def train_s(self, tokens: float, gpus: int) -> float:
        """Seconds of a training step on `tokens` tokens with `gpus` GPUs."""
        return self.train_fixed_s + tokens * self.train_gpu_s_per_token / gpus


QWEN3_30B_A3B = EngineCosts()


def read_costs(path: Path) -> EngineCosts:
    """The costs in a JSON file: any fields of `EngineCosts`; the others keep their defaults.

    Raises:
        InvalidRequestError: the file cannot be read, or has an unknown or invalid field.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot read costs from {path}: {error}") from error
    names = [field.name for field in fields(EngineCosts)]
    unknown = sorted(set(values) - set(names)) if isinstance(values, dict) else None
    if unknown is None or unknown:
        found = "no JSON object" if unknown is None else f"unknown {', '.join(unknown)}"
        raise InvalidRequestError(f"{path} has {found}: use fields of {', '.join(names)}")
    try:
        return replace(QWEN3_30B_A3B, **values)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error.message}") from error
