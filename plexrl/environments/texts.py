"""How observations become tokens, and replies text. What the model has read and drawn is never
encoded again: tokens of a turn are only appended."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from plexrl.environments.environment import Observation
from plexrl.model.text.chat_template import Message
from plexrl.model.text.tokenizer import Tokenizer

_PROBE = "PLEXRL-REPLY"
"""Stands for a reply; made longer until an observation does not have it."""


class TurnText(Protocol):
    """The text form of a trajectory."""

    def begin(self, observation: Observation) -> list[int]:
        """The tokens of a first observation."""

    def follow(self, drawn: Sequence[int], observation: Observation) -> list[int]:
        """The tokens that come behind a reply, whose tokens are `drawn`, up to the next reply."""

    def read(self, drawn: Sequence[int]) -> str:
        """The text of a reply."""


class PlainText:
    """Observations are written as they stand, one behind the other, without a chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` is the model's; special tokens in observations are text like any other."""
        self._tokenizer = tokenizer

    def begin(self, observation: Observation) -> list[int]:
        """As `TurnText.begin`."""
        return self._tokenizer.encode(_plain(observation))

    def follow(self, drawn: Sequence[int], observation: Observation) -> list[int]:
        """As `TurnText.follow`."""
        del drawn
        return self._tokenizer.encode(_plain(observation))

    def read(self, drawn: Sequence[int]) -> str:
        """As `TurnText.read`."""
        return self._tokenizer.decode(drawn)


class ChatText:
    """Observations are messages, written by the model's chat template; a text is one of the user.

    Earlier turns stay as the model has read and drawn them, also with a template that would leave
    out earlier thoughts: the trajectory is one sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer` is the model's, and `tools` are JSON schemas (`tool_schema`) that the
        template shows the model. `chat_template` and `variables` are as in
        `Tokenizer.apply_chat_template`."""
        self._tokenizer = tokenizer
        self._settings = {"tools": tools, "chat_template": chat_template, "variables": variables}

    def begin(self, observation: Observation) -> list[int]:
        """As `TurnText.begin`."""
        return self._encode(self._render(_messages(observation)))

    def follow(self, drawn: Sequence[int], observation: Observation) -> list[int]:
        """As `TurnText.follow`. The template's end of turn comes first, unless it was drawn."""
        answered, probe = _messages(observation), _PROBE
        while probe in str(answered):
            probe += "-"
        asked = [{"role": "user", "content": ""}, {"role": "assistant", "content": probe}]
        text = self._render([*asked, *answered]).rpartition(probe)[2]
        behind, ends = self._encode(text), self._tokenizer.end_tokens
        if drawn and drawn[-1] in ends:
            first = next((at for at, token in enumerate(behind) if token in ends), -1)
            del behind[: first + 1]
        return behind

    def read(self, drawn: Sequence[int]) -> str:
        """As `TurnText.read`."""
        # Marks of calls are special tokens in some models; only the end of the turn is left out.
        ends = self._tokenizer.end_tokens
        kept = drawn[:-1] if drawn and drawn[-1] in ends else drawn
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def _render(self, messages: Sequence[Message]) -> str:
        settings: Any = self._settings
        return self._tokenizer.chat_text(messages, add_generation_prompt=True, **settings)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, control_tokens=True)


def _plain(observation: Observation) -> str:
    if isinstance(observation, str):
        return observation
    return "".join(str(message["content"]) for message in observation)


def _messages(observation: Observation) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    return list(observation)
