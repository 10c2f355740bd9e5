"""Text to token ids and back, without torch.

A locally made model reads characters. Its tokenizer is written as a Hugging Face `tokenizer.json`,
so a checkpoint's directory is complete for any tool that loads such files.
"""

import json
from typing import TYPE_CHECKING

from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _HfTokenizer

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)


def char_tokenizer_json(vocabulary: str) -> str:
    """`tokenizer.json` of a tokenizer with the special tokens and one token per character.

    Raises:
        InvalidRequestError: a character stands in `vocabulary` twice.
    """
    if len(set(vocabulary)) != len(vocabulary):
        raise InvalidRequestError("a character stands in the vocabulary twice: name each once")
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

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens not added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of `tokens`, such as a sample's, special tokens left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
