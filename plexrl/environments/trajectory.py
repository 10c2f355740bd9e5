"""What the model and one environment have said to each other, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from plexrl.client.data.results import CapturedSegment, Sample, WeightsSpan
from plexrl.environments.environment import Environment

Ended = Literal["done", "turns", "length", "error"]


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One trajectory of `roll_out`."""

    environment: Environment
    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """For each token, 1 if the model drew it, and 0 if it read it, such as the output of a tool."""
    logprobs: list[float] = field(default_factory=list)
    """For each token, its logprob under the model that drew it, in nats; 0 where `mask` is 0."""
    weights: list[WeightsSpan] = field(default_factory=list)
    """The weights that drew the tokens; `start` is an index in `tokens`."""
    operations: list[str] = field(default_factory=list)
    """Ids of the generations, one for each turn."""
    finish_reason: str = ""
    """Why the last reply ended, as `Sample.finish_reason`."""
    reward: float = 0.0
    """Sum of the rewards of its turns. The rewards of turns before an error stay in it."""
    environment_s: float = 0.0
    """Seconds in which the environment was asked: the gaps between generations."""
    ended: Ended | None = None
    """`done` by its environment, after `turns_max` turns, at `max_sequence_tokens` tokens, or by an
    error of the environment, or because its last reply was interrupted."""
    error: Exception | None = None
    """The error that ended it."""

    _reply_start: int = field(default=0, repr=False)

    @property
    def turns(self) -> int:
        """Replies of the model."""
        return len(self.operations)

    @property
    def reply(self) -> list[int]:
        """The tokens of the last reply."""
        return self.tokens[self._reply_start :]

    def segment(self) -> CapturedSegment:
        """The trajectory as one row, for `Batch.from_segments`."""
        return CapturedSegment(
            tokens=self.tokens,
            mask=self.mask,
            logprobs=self.logprobs,
            weights=tuple(self.weights),
            finish_reason=self.finish_reason,
            operations=tuple(self.operations),
        )

    def reads(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model has not drawn."""
        self.tokens += tokens
        self.mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def drew(self, sample: Sample, operation: str) -> None:
        """Append a reply."""
        self._reply_start = start = len(self.tokens)
        self.weights += [span._replace(start=start + span.start) for span in sample.weights]
        self.tokens += sample.tokens
        self.mask += [1] * len(sample.tokens)
        self.logprobs += [float(each) for each in sample.logprobs]
        self.operations.append(operation)
        self.finish_reason = sample.finish_reason
