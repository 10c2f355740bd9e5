"""The profile of an asynchronous rollout: what its job generates and trains, and how long that
takes. `plexrl plan-rollout` simulates other ways to run the job from it."""

import math
from dataclasses import dataclass

import msgspec

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """One prompt and its responses."""

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    """Tokens of each response, one or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProfile:
    """Measured while a job runs; times are means.

    Raises:
        InvalidRequestError: a number is out of range, or there are no responses.
    """

    prompts: int
    """Prompts of one batch."""
    samples: int
    """Samples of a prompt."""
    max_tokens: int
    """Longest response."""
    lengths: tuple[PromptLengths, ...]
    """Lengths of the responses to the latest trained prompts."""
    instances: int
    instance_gpus: int
    """GPUs of one instance."""
    kv_tokens: int
    """KV cache of one instance."""
    trainer_gpus: int
    k1: float
    """Seconds of a decode step by token in the KV cache."""
    k2: float
    """Least seconds of a step's matrix products."""
    k3: float
    """Seconds of a step's matrix products by sample."""
    k4: float
    """Constant seconds of a step."""
    measured_steps: int = 0
    """Decode steps to which k1 to k4 are fitted; below 8 they are those of a 30B model on H20."""
    train_s: float
    """Seconds in which the trainer computes for one batch."""
    sync_s: float
    """Seconds in which an instance gets new weights."""

    def __post_init__(self) -> None:
        counts = ("prompts", "samples", "max_tokens", "instances", "instance_gpus", "kv_tokens")
        for name in (*counts, "trainer_gpus"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(
                    f"{name} of the profile is {getattr(self, name)}: give 1 or more"
                )
        for name in ("k1", "k2", "k3", "k4", "train_s", "sync_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidRequestError(
                    f"{name} of the profile is {getattr(self, name)}: give a finite number of at "
                    "least 0"
                )
        if not self.lengths or not all(
            length.response_tokens and min(*length.response_tokens, length.prompt_tokens) >= 1
            for length in self.lengths
        ):
            raise InvalidRequestError(
                "the profile needs prompts with responses, each of a token or more: take it after "
                "the first batch was trained"
            )

    def to_json(self) -> str:
        """Text for `rollout_profile_from_json`."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def rollout_profile_from_json(text: str | bytes) -> RolloutProfile:
    """The profile that `to_json` encoded. Raises `InvalidRequestError` for other text."""
    try:
        return msgspec.json.decode(text, type=RolloutProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"this is no profile of a rollout: {error}; write one with "
            "`plexrl rollouts JOB --profile NAME`"
        ) from error
