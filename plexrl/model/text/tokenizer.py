"""Converts text to token ids and back, without torch.

A generated model has a character-level tokenizer. It is saved as a Hugging Face `tokenizer.json`,
so that other tools can load a checkpoint's directory.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError, TokenRangeError
from plexrl.model.text.chat_template import Message, render_chat
from plexrl.model.text.files import (
    CONFIG,
    MODEL,
    TOKENIZER,
    chat_templates,
    end_token_ids,
    special_tokens,
    text_files,
)
from plexrl.wire.parameter_checks import short

if TYPE_CHECKING:
    from tokenizers import Encoding
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


def vocabulary_files(vocabulary: str) -> dict[str, str]:
    """The files of a generated model's directory that are about its text. Raises as
    `char_tokenizer_json`."""
    named = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return {
        TOKENIZER: char_tokenizer_json(vocabulary),
        CONFIG: json.dumps(named),
        MODEL: json.dumps({"eos_token_id": EOS}),
    }


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTokens:
    """A conversation as a prompt."""

    text: str
    tokens: list[int]
    assistant_mask: list[int] | None
    """For each token, 1 if the assistant wrote it, and 0 otherwise. None: the template does not
    mark the assistant's text with `{% generation %}`."""


class Tokenizer:
    """Encodes and decodes text with the `tokenizers` library."""

    def __init__(self, tokenizer_json: str, files: Mapping[str, str] | None = None) -> None:
        """`tokenizer_json` is the text of a Hugging Face `tokenizer.json`, whose sections
        `truncation` and `padding` are ignored; `files` are further files of the model's directory
        by name (`plexrl.model.text.files.NAMES`), which name special tokens and chat templates.

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
        self._files = dict(files or {})
        self._special = special_tokens(self._files)
        try:
            self._tokenizer: _HfTokenizer = HfTokenizer.from_str(tokenizer_json)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except Exception as error:
            # The library raises a bare `Exception` for everything that it cannot parse.
            raise InvalidRequestError(
                f"the tokenizer cannot be read ({error}): give the text of a tokenizer.json"
            ) from error
        self._unknown = _unknown_token(json.loads(tokenizer_json)["model"])
        # The library keeps this choice for all threads, and reads no control tokens if it is set.
        self._plain = HfTokenizer.from_str(self._tokenizer.to_str())
        self._plain.encode_special_tokens = True

    def __repr__(self) -> str:
        return f"<Tokenizer of {self._tokenizer.get_vocab_size()} tokens>"

    @classmethod
    def from_vocabulary(cls, vocabulary: str) -> "Tokenizer":
        """The character-level tokenizer of a generated model: ids 0 to 2 are `<pad>`, `<bos>` and
        `<eos>` (`plexrl.PAD`, `BOS`, `EOS`), then one id for each character of `vocabulary`.

        Raises:
            InvalidRequestError: `vocabulary` has a character twice.
        """
        return cls.from_files(vocabulary_files(vocabulary))

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of the Hugging Face model directory `path` on this machine.

        Raises:
            InvalidRequestError: it has no `tokenizer.json`, or a file cannot be read.
        """
        return cls.from_files(text_files(Path(path)))

    @classmethod
    def from_files(cls, files: Mapping[str, str]) -> "Tokenizer":
        """The tokenizer of a model directory's `files`, by name.

        Raises:
            InvalidRequestError: there is no `tokenizer.json`, or a file cannot be read.
        """
        if TOKENIZER not in files:
            raise InvalidRequestError(
                f"the model's directory has no {TOKENIZER}: save the model's tokenizer there"
            )
        return cls(files[TOKENIZER], files)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The model's special tokens by name: `bos_token`, `eos_token`, …"""
        return dict(self._special)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a generation, unless its sampling has `ignore_eos`: those of
        `generation_config.json`, and if it has none those of `config.json`."""
        return end_token_ids(self._files)

    @property
    def template_names(self) -> frozenset[str]:
        """The names of the model's own chat templates; the usual one is `default`."""
        return frozenset(chat_templates(self._files))

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = False,
        control_tokens: bool = False,
        allow_unknown: bool = False,
    ) -> list[int]:
        """Token ids of `text`.

        With `add_special_tokens`, the tokens that the model's `tokenizer.json` adds are added, such
        as one that begins every text (BOS); as in `transformers`, `add_bos_token` of the
        tokenizer's configuration changes nothing then. With `control_tokens`, a special token that
        is spelled out (`<eos>`) becomes that token; otherwise it is text like any other, so that
        text from elsewhere cannot end a turn. With `allow_unknown`, text without a token becomes
        the tokenizer's unknown token; a generated model's unknown token is `<pad>`.

        Raises:
            InvalidRequestError: `text` is not a str.
            TokenRangeError: a part of `text` has no token; `details["position"]` is its position.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(f"{short(text)} is not a text: give a str to encode")
        chosen = self._tokenizer if control_tokens else self._plain
        encoded = chosen.encode(text, add_special_tokens=add_special_tokens)
        if self._unknown is not None and not allow_unknown:
            self._refuse_unknown(text, encoded.tokens, encoded.offsets)
        return list(encoded.ids)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> ChatTokens:
        """The conversation as the model's chat template writes it, and its tokens. The template
        writes special tokens itself (BOS too), so none are added.

        `messages` are mappings with `role` and `content`; `tools` are JSON schemas. With
        `add_generation_prompt` the text ends where the assistant's next message begins, with
        `continue_final_message` inside the last message. `chat_template` is a template, or the name
        of one of the model's (default: the model's own; with tools that for tools, if it has one).
        `variables` are what the template reads besides, such as `enable_thinking`.

        Raises:
            InvalidRequestError: the model has no such template, the template refuses the messages,
                or `jinja2` is missing.
            TokenRangeError: a part of the text has no token.
        """
        template = self._template(chat_template, has_tools=tools is not None)
        rendered = render_chat(
            template,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._special, **(variables or {})},
        )
        encoded = self._tokenizer.encode(rendered.text, add_special_tokens=False)
        if self._unknown is not None:
            self._refuse_unknown(rendered.text, encoded.tokens, encoded.offsets)
        mask = None
        if rendered.spans is not None:
            mask = [0] * len(encoded.ids)
            for first, last in rendered.spans:
                _mark(mask, encoded, first, last)
        return ChatTokens(text=rendered.text, tokens=list(encoded.ids), assistant_mask=mask)

    def chat_text(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `apply_chat_template` alone, which may have parts without a token.

        `messages`, `tools`, `add_generation_prompt`, `chat_template` and `variables` are as there.

        Raises:
            InvalidRequestError: as `apply_chat_template`.
        """
        return render_chat(
            self._template(chat_template, has_tools=tools is not None),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={**self._special, **(variables or {})},
        ).text

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `tokens`, without special tokens unless `skip_special_tokens` is False.

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
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _template(self, given: str | None, *, has_tools: bool) -> str:
        own = chat_templates(self._files)
        if given is not None:
            return own.get(given, given)
        if has_tools and "tool_use" in own:
            return own["tool_use"]
        if "default" not in own:
            raise InvalidRequestError(
                "the model has no chat template of its own: give one as chat_template"
                + (f", or the name of one of its own: {', '.join(sorted(own))}" if own else "")
            )
        return own["default"]

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


def _mark(mask: list[int], encoded: "Encoding", first: int, last: int) -> None:
    """Set the mask of the tokens of characters `first` up to `last`."""
    if first >= last or (start := encoded.char_to_token(first)) is None:
        return
    end = encoded.char_to_token(last - 1)
    for index in range(start, len(mask) if end is None else end + 1):
        mask[index] = 1


def _unknown_token(model: dict[str, Any]) -> str | None:
    """The tokenizer's token for unknown text; None: it has none."""
    if model.get("unk_token") is not None:
        return str(model["unk_token"])
    index, entries = model.get("unk_id"), model.get("vocab")
    if index is None or not isinstance(entries, list):
        return None
    return str(entries[index][0])
