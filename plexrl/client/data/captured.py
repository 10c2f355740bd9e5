"""Segments of trajectories that were captured at the OpenAI-compatible endpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plexrl.client.data.results import WeightsSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSegment:
    """What the model has read and written as one sequence, over all turns that continue it."""

    tokens: list[int]
    """All tokens: prompts, drawn tokens, and what was put between them, such as tool output."""
    mask: list[int]
    """For each token, 1 if the model drew it, and 0 otherwise."""
    logprobs: list[float]
    """For each token, its logprob under the model that drew it, in nats; 0 where `mask` is 0."""
    weights: tuple[WeightsSpan, ...] = ()
    """The weights that drew the tokens; `start` is an index in `tokens`."""
    finish_reason: str = ""
    """Why the last turn ended, as `Sample.finish_reason`."""
    operations: tuple[str, ...] = ()
    """Ids of the generations, one for each turn."""

    def __repr__(self) -> str:
        return (
            f"CapturedSegment(tokens={len(self.tokens)}, drawn={sum(self.mask)}, "
            f"finish_reason={self.finish_reason!r}, turns={len(self.operations)})"
        )


def decode_segments(view: Mapping[str, Any]) -> list[CapturedSegment]:
    """The segments of an answer of a router."""
    return [
        CapturedSegment(
            tokens=list(plain["tokens"]),
            mask=list(plain["mask"]),
            logprobs=list(plain["logprobs"]),
            weights=tuple(WeightsSpan(*span) for span in plain["weights"]),
            finish_reason=str(plain["finish_reason"]),
            operations=tuple(plain["operations"]),
        )
        for plain in view["segments"]
    ]
