"""The files of a model's directory that say how its text is encoded, and where it ends.

Files are passed by name, so that a controller without the directory has them from its router.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
GENERATION = "generation_config.json"
MODEL = "config.json"

NAMES = (TOKENIZER, CONFIG, SPECIAL_TOKENS, TEMPLATE, TEMPLATE_JSON, GENERATION, MODEL)
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of further templates, each `NAME.jinja`."""


def text_files(folder: Path) -> dict[str, str]:
    """The files that `folder` has, as text."""
    paths = [folder / name for name in NAMES]
    paths += sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in paths if path.is_file()
    }


def read_object(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """A JSON file's object; empty if there is no such file.

    Raises:
        InvalidRequestError: it holds no JSON object.
    """
    try:
        found = json.loads(files.get(name, "{}"))
    except ValueError as error:
        raise InvalidRequestError(f"the model's {name} is no JSON ({error}): mend it") from error
    if not isinstance(found, dict):
        raise InvalidRequestError(f"the model's {name} holds no JSON object: mend it")
    return found


def special_tokens(files: Mapping[str, str]) -> dict[str, str]:
    """The model's special tokens by name (`bos_token`, `eos_token`, …), as templates see them."""
    found = {}
    for name, value in {**read_object(files, SPECIAL_TOKENS), **read_object(files, CONFIG)}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def chat_templates(files: Mapping[str, str]) -> dict[str, str]:
    """The model's chat templates by name; the usual one is `default`. Files of their own come
    before the tokenizer's configuration, as in `transformers`."""
    config: Any = read_object(files, CONFIG).get("chat_template")
    found: dict[str, str] = {}
    if isinstance(config, str):
        found["default"] = config
    elif isinstance(config, list):
        found = {each["name"]: each["template"] for each in config}
    own: Any = read_object(files, TEMPLATE_JSON).get("chat_template")
    if isinstance(own, str):
        found["default"] = own
    if TEMPLATE in files:
        found["default"] = files[TEMPLATE]
    for name, text in files.items():
        folder, _, file = name.rpartition("/")
        if folder == NAMED_TEMPLATES:
            found[file.removesuffix(".jinja")] = text
    return found


def end_token_ids(files: Mapping[str, str]) -> frozenset[int]:
    """The tokens that end a generation: those of the generation's configuration, and if it has none
    those of the model's."""
    for name in (GENERATION, MODEL):
        found = as_ids(read_object(files, name).get("eos_token_id"))
        if found:
            return found
    return frozenset()


def as_ids(value: Any) -> frozenset[int]:
    """The ids of an `eos_token_id`: one, a list, or none."""
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list | tuple) else [value]
    return frozenset([int(each) for each in ids])
