"""Renders a conversation with a model's own chat template, as `transformers` does.

A template is Jinja in a sandbox: it comes with the model, and may be anybody's. What stands between
`{% generation %}` and `{% endgeneration %}` is the assistant's own text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError
from plexrl.wire.parameter_checks import short

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]
"""One message: `role`, `content`, and whatever the template reads."""

TEXT_MAX = 1 << 26
"""Characters that a template may write."""

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as one text."""

    text: str
    spans: tuple[tuple[int, int], ...] | None
    """The assistant's parts, from and up to a character. None: the template marks none."""


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, Any],
) -> RenderedChat:
    """The conversation's text. Arguments are those of `Tokenizer.apply_chat_template`.

    Raises:
        InvalidRequestError: `jinja2` is missing, a message is no mapping, the template refuses the
            messages, or there is no final message to continue.
    """
    chat = _checked(messages)
    if continue_final_message:
        if add_generation_prompt:
            raise InvalidRequestError(
                "a final message is continued, or a new one begins: give one of "
                "continue_final_message and add_generation_prompt"
            )
        _mark_final(chat)
    compiled, marks = _compiled(template)
    rendered = ""
    spans: list[tuple[int, int]] = []
    try:
        for block in compiled.generate(
            messages=chat,
            tools=None if tools is None else [dict(tool) for tool in tools],
            documents=None,
            add_generation_prompt=add_generation_prompt,
            _spans=(begun := _Begun(spans)),
            **variables,
        ):
            rendered += block
            if len(rendered) > TEXT_MAX:
                raise ValueError(f"it writes more than {TEXT_MAX} characters")
            begun.length = len(rendered)
    except Exception as error:
        # A template raises what it likes: `raise_exception`, a missing key, a wrong type.
        raise InvalidRequestError(
            f"the chat template refuses the messages ({type(error).__name__}: {error}): check "
            "their roles and contents, and the variables that it reads"
        ) from error
    if continue_final_message:
        rendered = _cut_at_mark(rendered)
    return RenderedChat(rendered, tuple(spans) if marks else None)


@dataclass(slots=True)
class _Begun:
    """The text so far, while a template is rendered."""

    spans: list[tuple[int, int]]
    length: int = 0


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not all(isinstance(m, Mapping) for m in messages):
        raise InvalidRequestError(
            f"{short(messages)} is no conversation: give a list of messages, such as "
            '[{"role": "user", "content": "…"}]'
        )
    return [dict(message) for message in messages]


def _mark_final(chat: list[dict[str, Any]]) -> None:
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise InvalidRequestError(
            "continue_final_message needs a final message whose content is a text: add it, or "
            "leave continue_final_message out"
        )
    chat[-1]["content"] = content + _CONTINUED


def _cut_at_mark(rendered: str) -> str:
    at = rendered.rfind(_CONTINUED.strip())
    if at < 0:
        raise InvalidRequestError(
            "the chat template leaves the final message out, so it cannot be continued: give "
            "add_generation_prompt instead"
        )
    # A template that strips messages strips the mark's space, and the message's own.
    stripped = not rendered.startswith(_CONTINUED, at)
    return rendered[:at].rstrip() if stripped else rendered[:at]


@lru_cache(maxsize=32)
def _compiled(template: str) -> "tuple[Template, bool]":
    """The template, and whether it marks the assistant's text."""
    try:
        import jinja2
        from jinja2 import ext, nodes, parser, sandbox
    except ImportError as error:
        raise InvalidRequestError(
            "chat templates need the `jinja2` library: pip install 'plexrl[text]'"
        ) from error

    class Generation(ext.Extension):
        """The block that marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark", [nodes.ContextReference()])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, context: Any, caller: Any) -> str:
            text = str(caller())
            begun: _Begun = context["_spans"]
            begun.spans.append((begun.length, begun.length + len(text)))
            return text

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template), "endgeneration" in template
    except jinja2.TemplateError as error:
        raise InvalidRequestError(
            f"the chat template is no valid Jinja ({error}): give another chat_template"
        ) from error


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes what has a meaning in HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> str:
    raise ValueError(message)


def _now(form: str) -> str:
    # Templates that state the date mean that of the user's clock.
    return datetime.now().strftime(form)  # noqa: DTZ005
