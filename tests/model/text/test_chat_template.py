"""A conversation becomes the text, tokens and masks that `transformers` makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.model.text.tokenizer import Tokenizer
from tests.model.text.test_tokenizer import directory, theirs

MARKED = """{{ bos_token }}{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
    {{ raise_exception('no role ' + message.role) }}
{%- endif %}
<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else -%}
{{ message.content | trim }}{{ '<|end|>' }}
{%- endif -%}
{%- if loop.index > 9 %}{% break %}{% endif -%}
{%- endfor -%}
{%- if tools %}{{ tools | tojson(indent=1) }}{% endif -%}
{%- if add_generation_prompt -%}<|assistant|>{% if thinks is defined and thinks %}hm{% endif %}
{%- endif -%}"""
"""Marks the assistant's text."""
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TOOLS_TOO = "tools: {{ tools | length }}"
ASKED = [{"role": "user", "content": " hello wörld? "}]
TALK = [
    {"role": "system", "content": "Be <short> & 'exact'"},
    *ASKED,
    {"role": "assistant", "content": "☃ hello"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "hello world "},
]
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & 'c' é"}}


def pair(folder: Path, template: str, file: str) -> tuple[Tokenizer, Any]:
    """Our tokenizer and that of `transformers`, with a template in this file."""
    made = directory(folder / "m")
    if file == "tokenizer_config.json":
        directory(folder / "m", config={"chat_template": template})
    else:
        (made / file).write_text(template)
    return Tokenizer.from_directory(made), theirs(made)


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (ASKED, {"add_generation_prompt": True}),
        (ASKED, {"add_generation_prompt": True, "variables": {"thinks": True}}),
        (TALK, {}),
        (TALK, {"tools": [TOOL]}),
        (TALK, {"continue_final_message": True}),
        (TALK[:-1], {"continue_final_message": True}),
    ],
)
def test_text_tokens_and_masks_are_those_of_transformers(
    tmp_path: Path, file: str, messages: list[dict[str, str]], options: dict[str, Any]
) -> None:
    own, other = pair(tmp_path, MARKED, file)
    options = dict(options)
    found = own.apply_chat_template(messages, **options)
    options |= options.pop("variables", {})
    assert found.text == other.apply_chat_template(messages, tokenize=False, **options)
    if "continue_final_message" in options:
        # `transformers` has no masks here.
        assert found.tokens == other.apply_chat_template(messages, return_dict=False, **options)
        return
    wanted = other.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    assert found.tokens == wanted["input_ids"]
    assert found.assistant_mask == list(wanted["assistant_masks"])
    assert "generation" not in found.text


def test_the_mask_covers_what_the_assistant_wrote_and_its_end(tmp_path: Path) -> None:
    own, _ = pair(tmp_path, MARKED, "chat_template.jinja")
    found = own.apply_chat_template(TALK)
    assert found.assistant_mask is not None
    inside = [t for t, m in zip(found.tokens, found.assistant_mask, strict=True) if m]
    assert own.decode(inside, skip_special_tokens=False) == "☃ hello<eos>hello world <eos>"


def test_a_template_without_marks_has_no_mask(tmp_path: Path) -> None:
    own, _ = pair(tmp_path, PLAIN, "chat_template.jinja")
    assert own.apply_chat_template(TALK).assistant_mask is None


def test_a_template_is_chosen_by_name_and_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS_TOO}]
    folder = directory(tmp_path / "m", config={"chat_template": named})
    own, other = Tokenizer.from_directory(folder), theirs(folder)
    for options in ({}, {"tools": [TOOL]}, {"chat_template": "tool_use", "tools": []}):
        found = own.apply_chat_template(TALK, **options)
        assert found.text == other.apply_chat_template(TALK, tokenize=False, **options)
    assert own.apply_chat_template(TALK, tools=[TOOL]).text == "tools: 1"
    assert own.apply_chat_template(TALK, chat_template="{{ messages | length }}").text == "5"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (MARKED, [{"role": "other", "content": "x"}], "no role other"),
        (MARKED, [{"content": "x"}], "refuses the messages"),
        (MARKED, "hello", "is no conversation"),
        (MARKED, ["hello"], "is no conversation"),
        ("{% for %}", ASKED, "no valid Jinja"),
        ("{{ ''.__class__.__mro__ }}", ASKED, "SecurityError"),
        ("{{ messages.append(1) }}", ASKED, "SecurityError"),
    ],
)
def test_what_a_template_refuses_is_refused_typed(
    tmp_path: Path, template: str, messages: Any, message: str
) -> None:
    own, _ = pair(tmp_path, template, "chat_template.jinja")
    with pytest.raises(InvalidRequestError, match=message):
        own.apply_chat_template(messages)


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    own = Tokenizer.from_directory(directory(tmp_path / "m"))
    with pytest.raises(InvalidRequestError, match="no chat template of its own"):
        own.apply_chat_template(ASKED)


def test_only_one_end_of_a_conversation_is_possible(tmp_path: Path) -> None:
    own, _ = pair(tmp_path, MARKED, "chat_template.jinja")
    with pytest.raises(InvalidRequestError, match="give one of"):
        own.apply_chat_template(TALK, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InvalidRequestError, match="needs a final message"):
        own.apply_chat_template([], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="leaves the final message out"):
        own.apply_chat_template(ASKED, continue_final_message=True, chat_template="x")


def test_files_of_the_model_are_found_by_their_names(tmp_path: Path) -> None:
    folder = directory(tmp_path / "m")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.from_directory(folder).apply_chat_template(ASKED).text == "json"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    found = Tokenizer.from_directory(folder).apply_chat_template(ASKED, chat_template="rag")
    assert found.text == "rag"
