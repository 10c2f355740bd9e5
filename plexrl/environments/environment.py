"""What a trajectory of several turns runs against."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plexrl.model.text.chat_template import Message

Observation = str | Sequence[Message]
"""What the model reads next: a text, or messages of a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answer of an environment to one reply of the model."""

    observation: Observation = ""
    """What the model reads next; of no use if the trajectory is over."""
    reward: float = 0.0
    """Reward of this turn. The reward of a trajectory is the sum over its turns."""
    done: bool = False
    """Whether the trajectory is over."""


class Environment(Protocol):
    """One trajectory's counterpart. Both methods are called in threads, one call at a time for each
    environment, and may block; an error ends the trajectory."""

    @property
    def stops(self) -> Sequence[str]:
        """Texts at which a reply ends, such as the end of a call of a tool."""

    def reset(self) -> Observation:
        """Begin, and return what the model reads first."""

    def step(self, reply: str) -> Step:
        """Answer the text that the model has written in this turn, its stop text included."""


__all__ = ["Environment", "Message", "Observation", "Step"]
