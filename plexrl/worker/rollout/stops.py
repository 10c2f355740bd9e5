"""Where a row ends by what it has drawn: tokens, sequences of tokens, texts."""

from collections.abc import Callable, Sequence
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import ModelSpec
from plexrl.model.text.files import TOKENIZER, text_files
from plexrl.model.text.tokenizer import Tokenizer, char_tokenizer_json
from plexrl.storage.model_folder import model_folder
from plexrl.wire.operations import SamplingParams

Decode = Callable[[Sequence[int]], str]
"""The text of tokens, with special tokens."""

SLACK_TOKENS = 8
"""Tokens before those that a text may span: of the first ones, a decoder may leave out a space, or
the rest of a character."""


def is_at_stop(drawn: Any, sampling: SamplingParams, decode: Decode | None) -> bool:
    """Whether a row ends with the last of its drawn tokens, a list or an array. It ended with none
    before that one."""
    if drawn[-1] in sampling.stop_token_ids:
        return True
    if any(tuple(drawn[-len(stop) :]) == tuple(stop) for stop in sampling.stop_sequences):
        return True
    if not sampling.stop_strings:
        return False
    assert decode is not None, "the engine refuses texts without a tokenizer"
    # A token is at least one byte of a text.
    longest = max(len(text.encode()) for text in sampling.stop_strings)
    last = drawn[-longest - SLACK_TOKENS :]
    if not _has_any(decode(last), sampling):
        return False
    # What a decoder leaves out at the beginning of a text may be inside the row's.
    return len(last) == len(drawn) or _has_any(decode(drawn), sampling)


def _has_any(text: str, sampling: SamplingParams) -> bool:
    return any(stop in text for stop in sampling.stop_strings)


class TextDecoder:
    """Decodes tokens of a model. Its tokenizer is read when it is first used."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._tokenizer: Tokenizer | None = None

    def __call__(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens."""
        assert self._tokenizer is not None
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def prepare(self) -> None:
        """Read the tokenizer.

        Raises:
            InvalidRequestError: the model has none, or it cannot be read.
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._tokenizer_json())

    def _tokenizer_json(self) -> str:
        model = self._model
        if model.path is not None:
            found = text_files(model_folder(model.path, weights=False)).get(TOKENIZER)
            if found is not None:
                return found
        elif model.vocabulary:
            return char_tokenizer_json(model.vocabulary)
        raise InvalidRequestError(
            "stop_strings are matched on text, and the model has no tokenizer: use stop_sequences, "
            "or a model with a tokenizer.json or a vocabulary",
            parameter="stop_strings",
        )
