"""Converts text to token ids and back, without torch.

A generated model has a character-level tokenizer. It is saved as a Hugging Face `tokenizer.json`,
so that other tools can load a checkpoint's directory.
"""

import json
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError, TokenRangeError
from plexrl.wire.parameter_checks import short

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _HfTokenizer

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)
TOKENS_MAX = 2**31
"""Upper bound of token ids, exclusive."""


def char_tokenizer_json(vocabulary: str) -> str:
    """`tokenizer.json` of a tokenizer with the special tokens and one token per character.

    Raises:
        InvalidRequestError: `vocabulary` has a character twice.
    """
    check_vocabulary(vocabulary)
    added = [
        {
            "id": index,
            "content": token,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    tokens = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *vocabulary))}
    body = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "<pad>"},
    }
    return json.dumps(body, ensure_ascii=False)


def check_vocabulary(vocabulary: object) -> None:
    """Raises `InvalidRequestError` if a vocabulary is not a text, or has a character twice."""
    if not isinstance(vocabulary, str):
        raise InvalidRequestError(
            f"the vocabulary is {short(vocabulary)}: give its characters as one text"
        )
    twice = sorted({each for each in vocabulary if vocabulary.count(each) > 1})
    if twice:
        raise InvalidRequestError(
            f"{twice[0]!r} is in the vocabulary twice: name each character once"
        )


class Tokenizer:
    """Encodes and decodes text with the `tokenizers` library."""

    def __init__(self, tokenizer_json: str) -> None:
        """`tokenizer_json` is the text of a Hugging Face `tokenizer.json`.

        Raises:
            InvalidRequestError: the `tokenizers` library is missing (`pip install 'plexrl[text]'`),
                or it cannot read the text.
        """
        try:
            from tokenizers import Tokenizer as HfTokenizer
        except ImportError as error:
            raise InvalidRequestError(
                "encoding text needs the `tokenizers` library: pip install 'plexrl[text]'"
            ) from error
        try:
            self._tokenizer: _HfTokenizer = HfTokenizer.from_str(tokenizer_json)
        except Exception as error:
            # The library raises a bare `Exception` for everything that it cannot parse.
            raise InvalidRequestError(
                f"the tokenizer cannot be read ({error}): give the text of a tokenizer.json"
            ) from error
        self._unknown = _unknown_token(json.loads(tokenizer_json)["model"])

    def __repr__(self) -> str:
        return f"<Tokenizer of {self._tokenizer.get_vocab_size()} tokens>"

    @classmethod
    def from_vocabulary(cls, vocabulary: str) -> "Tokenizer":
        """The character-level tokenizer of a generated model: ids 0 to 2 are `<pad>`, `<bos>` and
        `<eos>` (`plexrl.PAD`, `BOS`, `EOS`), then one id for each character of `vocabulary`.

        Raises:
            InvalidRequestError: `vocabulary` has a character twice.
        """
        return cls(char_tokenizer_json(vocabulary))

    def encode(self, text: str, *, allow_unknown: bool = False) -> list[int]:
        """Token ids of `text`, without special tokens.

        With `allow_unknown`, text without a token is encoded as the tokenizer's unknown token; a
        generated model's unknown token is `<pad>`.

        Raises:
            InvalidRequestError: `text` is not a str.
            TokenRangeError: a part of `text` has no token; `details["position"]` is its position.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"{short(text)} is not a text: give a str to encode")
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if self._unknown is not None and not allow_unknown:
            self._refuse_unknown(text, encoded.tokens, encoded.offsets)
        return list(encoded.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, without special tokens.

        Raises:
            InvalidRequestError: a token is not a whole number, or is out of range.
        """
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise InvalidRequestError(
                f"{short(tokens)} is not a list of tokens: give a list of token ids"
            )
        ids = list(tokens)
        for at, token in enumerate(ids):
            if not isinstance(token, Integral) or not 0 <= token < TOKENS_MAX:
                raise InvalidRequestError(
                    f"token {at} is {short(token)}: give whole numbers, at least 0 and below 2^31"
                )
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _refuse_unknown(
        self, text: str, tokens: list[str], offsets: Sequence[tuple[int, int]]
    ) -> None:
        for token, (start, end) in zip(tokens, offsets, strict=True):
            if token == self._unknown and text[start:end] != token:
                raise TokenRangeError(
                    f"{text[start:end]!r} at position {start} of {short(text)} is not in the "
                    "vocabulary: leave it out, use a model and a tokenizer whose vocabulary has "
                    f"it, or encode it as {token} with encode(…, allow_unknown=True)",
                    text=text[start:end],
                    position=start,
                )


def _unknown_token(model: dict[str, Any]) -> str | None:
    """The tokenizer's token for unknown text; None: it has none."""
    if model.get("unk_token") is not None:
        return str(model["unk_token"])
    index, entries = model.get("unk_id"), model.get("vocab")
    if index is None or not isinstance(entries, list):
        return None
    return str(entries[index][0])
