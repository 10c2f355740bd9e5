"""Texts of drawn tokens: of one token, of a sample that is still being drawn, and calls of tools in
them. Pure, but for the tokenizer."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from plexrl.model.text.tokenizer import Tokenizer

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
"""What models of the Hermes and Qwen families write around a call, which is JSON with `name` and
`arguments`."""

_CALL = re.compile(rf"{CALL_BEGIN}\s*(\{{.*?\}})\s*{CALL_END}", re.DOTALL)
_PARTIAL = "\ufffd"
"""What stands for bytes that are no whole character yet."""


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call of a tool in a reply."""

    name: str
    arguments: str
    """JSON."""


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the stop strings in it."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def split_calls(text: str) -> tuple[str, list[FoundCall]]:
    """The text before the first call, and the calls. A text with a call that cannot be read, or
    with text between and behind calls, has none: nothing of it is lost."""
    calls: list[FoundCall] = []
    first, end = len(text), 0
    for found in _CALL.finditer(text):
        call = _read_call(found[1])
        if call is None or (calls and text[end : found.start()].strip()):
            return text, []
        first, end = min(first, found.start()), found.end()
        calls.append(call)
    if not calls or text[end:].strip():
        return text, []
    return text[:first].rstrip(), calls


def _read_call(text: str) -> FoundCall | None:
    try:
        plain: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    name, arguments = plain.get("name"), plain.get("arguments", {})
    if not isinstance(name, str):
        return None
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return FoundCall(name, arguments)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one token alone, special tokens included."""
    return tokenizer.decode([token], skip_special_tokens=False)


@dataclass(slots=True)
class GrowingText:
    """The text of one sample while it is drawn. A client gets only what later tokens cannot change:
    whole characters, and nothing that may be the beginning of a stop string or of a call."""

    tokenizer: Tokenizer
    stops: Sequence[str]
    holds_calls: bool
    """Text from the first call on is kept back: calls are sent as such when they are whole."""
    tokens: list[int] = field(default_factory=list)
    sent: int = 0
    """Characters that were sent."""

    def take(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the next part of the text to send."""
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens).rstrip(_PARTIAL)
        marks = [*self.stops, *([CALL_BEGIN] if self.holds_calls else [])]
        text = cut_at_stop(text, marks)
        text = text[: len(text) - max((_begun(text, mark) for mark in marks), default=0)]
        return self._part(text)

    def restart(self) -> None:
        """Forget the tokens: the generation has begun anew. The text that was sent stays."""
        self.tokens = []

    def rest(self, text: str) -> str:
        """What is left to send of the sample's final text."""
        return self._part(text)

    def _part(self, text: str) -> str:
        part = text[self.sent :]
        self.sent = max(self.sent, len(text))
        return part


def _begun(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
