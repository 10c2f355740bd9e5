"""Texts of drawn tokens: of one token, and of a sample that is still being drawn. Pure, but for the
tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from plexrl.model.text.tokenizer import Tokenizer
from plexrl.model.text.tool_calls import CALL_BEGIN

_WINDOW = 64
"""Tokens after which a growing text is not decoded again, but for this context."""
_PARTIAL = "\ufffd"
"""What stands for bytes that are no whole character yet."""


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the stop strings in it."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


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
    sent: str = ""
    _fixed: str = ""
    """The text of the tokens up to `_end`. Later ones are decoded behind those from `_begin`."""
    _begin: int = 0
    _end: int = 0

    def take(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the next part of the text to send."""
        self.tokens += tokens
        text = self._decoded().rstrip(_PARTIAL)
        marks = [*self.stops, *([CALL_BEGIN] if self.holds_calls else [])]
        text = cut_at_stop(text, marks)
        text = text[: len(text) - max((_begun(text, mark) for mark in marks), default=0)]
        if len(text) <= len(self.sent) or not text.startswith(self.sent):
            return ""
        part, self.sent = text[len(self.sent) :], text
        return part

    def restart(self) -> None:
        """Forget the tokens: the generation has begun anew. The text that was sent stays."""
        self.tokens, self._fixed = [], ""
        self._begin = self._end = 0

    def rest(self, text: str) -> str:
        """The part of the sample's final text that was not sent yet."""
        return text[len(self.sent) :]

    def _decoded(self) -> str:
        context = self.tokenizer.decode(self.tokens[self._begin : self._end])
        text = self._fixed + self.tokenizer.decode(self.tokens[self._begin :])[len(context) :]
        is_long = len(self.tokens) - self._end >= _WINDOW
        if is_long and not text.endswith(_PARTIAL) and len(text) > len(self._fixed):
            self._fixed, self._begin, self._end = text, self._end, len(self.tokens)
        return text


def _begun(text: str, mark: str) -> int:
    """Number of characters at the end of `text` that may be the beginning of `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
