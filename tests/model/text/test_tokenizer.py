"""Text becomes the tokens that `transformers` makes of it, and they become the same text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.model.text.tokenizer import Tokenizer
from tests.examples import examples

pytest.importorskip("transformers")

TEXTS = [
    "<|user|>hello world<|end|> hello",
    "wörld ☃ héllo 你好 world",
    " a  b\n\nc ",
    "<bos>already",
    "",
]
CORPUS = ["hello world", "wörld ☃ héllo 你好", "a b c\n\n", "already the world", "user assistant"]


def byte_level(*, bos: bool) -> dict[str, Any]:
    """`tokenizer.json` of a byte-level BPE with special tokens."""
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = HfTokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    # Typed in some versions of the library only.
    make_trainer: Any = trainers.BpeTrainer
    trainer = make_trainer(
        vocab_size=330,
        special_tokens=["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS * 3, trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    found: dict[str, Any] = json.loads(made.to_str())
    return found


WHOLE = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
NAMED = {
    "bos_token": "<bos>",
    "eos_token": {"__type": "AddedToken", "content": "<eos>", "special": True, **WHOLE},
    "pad_token": "<pad>",
}


def directory(folder: Path, *, bos: bool = True, config: dict[str, Any] | None = None) -> Path:
    """A model's directory with what is about text."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(byte_level(bos=bos)))
    text = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED, **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(text))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 2}))
    return folder


def theirs(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    # The class that a model type has may build another tokenizer than the file's.
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
    ],
    ids=str,
)
def test_special_tokens_are_added_where_transformers_adds_them(
    tmp_path: Path, bos: bool, config: dict[str, Any]
) -> None:
    folder = directory(tmp_path / "m", bos=bos, config=config)
    own, other = Tokenizer.from_directory(folder), theirs(folder)
    for text in TEXTS:
        for adds in (False, True):
            found = own.encode(text, add_special_tokens=adds, control_tokens=True)
            assert found == other.encode(text, add_special_tokens=adds), (text, adds)


def test_control_tokens_in_text_are_text_unless_they_are_asked_for(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m")
    own, other = Tokenizer.from_directory(folder), theirs(folder)
    for text in TEXTS:
        plain = own.encode(text)
        wanted = other.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert plain == wanted, text
        assert not {1, 2, 3, 4, 5} & set(plain)
    assert own.encode(TEXTS[0], control_tokens=True)[0] == 3
    # One choice does not stay for the next call.
    assert 3 not in own.encode(TEXTS[0])


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m")
    wanted = Tokenizer.from_directory(folder).encode("hello world " * 20)
    body = json.loads((folder / "tokenizer.json").read_text())
    body["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    body["padding"] = {
        "strategy": {"Fixed": 200},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    own = Tokenizer(json.dumps(body))
    assert own.encode("hello world " * 20) == wanted
    assert len(wanted) > 20
    assert own.encode("a") == Tokenizer.from_directory(folder).encode("a")


@given(st.text())
@settings(max_examples=examples(60), deadline=None)
def test_a_text_survives_its_tokens(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


BYTE_LEVEL = Tokenizer(json.dumps(byte_level(bos=True)))


def test_special_tokens_are_decoded_if_that_is_asked_for() -> None:
    tokens = [1, *BYTE_LEVEL.encode("hello"), 5]
    assert BYTE_LEVEL.decode(tokens) == "hello"
    assert BYTE_LEVEL.decode(tokens, skip_special_tokens=False) == "<bos>hello<|end|>"


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [(None, {2}), ({"eos_token_id": [1, 5]}, {1, 5}), ({"eos_token_id": 5}, {5}), ({}, {2})],
)
def test_end_tokens_are_those_of_the_generations_configuration(
    tmp_path: Path, generation: dict[str, Any] | None, wanted: set[int]
) -> None:
    folder = directory(tmp_path / "m")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.from_directory(folder).end_tokens == wanted


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    folder = directory(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(InvalidRequestError, match=r"tokenizer_config\.json is no JSON"):
        Tokenizer.from_directory(folder)
