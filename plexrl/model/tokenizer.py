"""Text to token ids and back, without torch.

A locally made model reads characters. Its tokenizer is written as a Hugging Face `tokenizer.json`,
so a checkpoint's directory is complete for any tool that loads such files.
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
"""Token ids are below it."""


def char_tokenizer_json(vocabulary: str) -> str:
    """`tokenizer.json` of a tokenizer with the special tokens and one token per character.

    Raises:
        InvalidRequestError: a character stands in `vocabulary` twice.
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
    """Raises `InvalidRequestError` for what is no text, or has a character twice."""
    if not isinstance(vocabulary, str):
        raise InvalidRequestError(
            f"the vocabulary is {short(vocabulary)}: give its characters as one text"
        )
    twice = sorted({each for each in vocabulary if vocabulary.count(each) > 1})
    if twice:
        raise InvalidRequestError(
            f"{twice[0]!r} stands in the vocabulary twice: name each character once"
        )


class Tokenizer:
    """Encodes and decodes by way of the `tokenizers` library."""

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
                "reading text needs the `tokenizers` library: pip install 'plexrl[text]'"
            ) from error
        try:
            self._tokenizer: _HfTokenizer = HfTokenizer.from_str(tokenizer_json)
        except Exception as error:
            # The library raises bare `Exception` for whatever it cannot parse.
            raise InvalidRequestError(f"this is no tokenizer.json: {error}") from error
        self._unknown = _unknown_token(json.loads(tokenizer_json)["model"])

    def __repr__(self) -> str:
        return f"<Tokenizer of {self._tokenizer.get_vocab_size()} tokens>"

    @classmethod
    def from_vocabulary(cls, vocabulary: str) -> "Tokenizer":
        """The character-level tokenizer of a locally made model: ids 0 to 2 are `<pad>`, `<bos>`
        and `<eos>` (`plexrl.PAD`, `BOS`, `EOS`), then one for each character of `vocabulary`.

        Raises:
            InvalidRequestError: a character stands in `vocabulary` twice.
        """
        return cls(char_tokenizer_json(vocabulary))

    def encode(self, text: str, *, allow_unknown: bool = False) -> list[int]:
        """Token ids of `text`, special tokens not added.

        With `allow_unknown` what has no token is encoded as the tokenizer's token for that, which
        of a locally made model is `<pad>`.

        Raises:
            InvalidRequestError: `text` is no text.
            TokenRangeError: something in it has no token; `details["position"]` says where.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"{short(text)} is no text: give a str to encode")
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        if self._unknown is not None and not allow_unknown:
            self._refuse_unknown(text, encoded.tokens, encoded.offsets)
        return list(encoded.ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, such as a sample's, special tokens left out.

        Raises:
            InvalidRequestError: a token is no whole number, or none of a vocabulary's.
        """
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise InvalidRequestError(f"{short(tokens)} are no tokens: give a list of token ids")
        ids = list(tokens)
        for at, token in enumerate(ids):
            if not isinstance(token, Integral) or not 0 <= token < TOKENS_MAX:
                raise InvalidRequestError(
                    f"token {at} is {short(token)}: give whole numbers, as samples have them"
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
                    f"it, or have it encoded as {token} by encode(…, allow_unknown=True)",
                    text=text[start:end],
                    position=start,
                )


def _unknown_token(model: dict[str, Any]) -> str | None:
    """What a tokenizer gives for text that it has no token for; None: it never has to."""
    if model.get("unk_token") is not None:
        return str(model["unk_token"])
    place, words = model.get("unk_id"), model.get("vocab")
    if place is None or not isinstance(words, list):
        return None
    return str(words[place][0])
