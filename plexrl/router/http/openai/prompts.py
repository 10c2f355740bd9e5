"""Prompts of requests, as tokens. Pure, but for the tokenizer.

A prompt that continues a reply of its trajectory begins with that reply's own tokens, and is not
encoded again: text that was drawn as `ab` may be encoded as another pair of tokens, and then the
model would be trained on tokens that it has not drawn. Behind them come the tokens of what the
template writes after the reply: its end of turn, without the end token if that was drawn, and all
later messages.

That needs a template that only appends: the conversation up to the reply, written without its
later messages, must be the beginning of the whole. Templates that rewrite earlier turns, such as
those that drop earlier thoughts, begin a new segment instead, as the model then reads other text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.model.text.tokenizer import Tokenizer
from plexrl.router.http.openai.requests import ChatRequest, CompletionRequest
from plexrl.router.http.openai.trajectory import CapturedReply, history_digest

NOISE = frozenset({"refusal", "annotations", "audio", "function_call", "id", "index", "type"})
"""Fields of messages, and of calls in them, that clients add to what they return."""
_PROBE = "PLEXRL-REPLY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt."""

    tokens: list[int]
    parent: CapturedReply | None = None
    """The reply whose sequence it continues; None: it continues none."""


def chat_settings(request: ChatRequest) -> dict[str, Any]:
    """What the template's text depends on beside the messages."""
    return {
        "tools": request.offered_tools,
        "template": request.chat_template,
        "variables": request.chat_template_kwargs,
    }


def canonical(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without what clients add or leave out when they return a reply."""
    found = []
    for message in messages:
        kept = {name: value for name, value in message.items() if name not in NOISE}
        if "tool_calls" in kept:
            kept["tool_calls"] = [call["function"] for call in kept["tool_calls"]]
        found.append(kept)
    return found


def chat_prompt(
    tokenizer: Tokenizer, request: ChatRequest, known: Sequence[CapturedReply] = ()
) -> Prompt:
    """The prompt of a conversation, which continues the longest of the `known` replies that it
    begins with.

    Raises:
        InvalidRequestError: the model has no such template, or it refuses the messages.
    """
    # A template is a program, and runs in the router: a client's own is not rendered.
    if request.chat_template is not None and request.chat_template not in tokenizer.template_names:
        raise InvalidRequestError(
            "chat_template: name one of the model's own templates", where="body.chat_template"
        )
    messages = request.conversation()
    plain, settings = canonical(messages), chat_settings(request)
    digest = cache(lambda measure: history_digest("chat", plain[:measure], settings))
    for reply in sorted(known, key=lambda each: -each.measure):
        if reply.measure >= len(plain):
            continue
        if digest(reply.measure) != reply.digest:
            continue
        if (behind := _after_reply(tokenizer, request, messages, reply)) is not None:
            return Prompt(tokens=[*reply.tokens, *behind], parent=reply)
    text = _render(tokenizer, request, messages, is_prompt=True)
    return Prompt(tokens=tokenizer.encode(text, control_tokens=True))


def text_prompt(
    tokenizer: Tokenizer | None,
    request: CompletionRequest,
    given: str | list[int],
    known: Sequence[CapturedReply] = (),
) -> Prompt:
    """The prompt of a completion; as `chat_prompt`."""
    if not isinstance(given, str):
        for reply in sorted(known, key=lambda each: -each.length):
            if reply.begins(given):
                return Prompt(tokens=given, parent=reply)
        return Prompt(tokens=given)
    assert tokenizer is not None, "texts need a tokenizer"
    digest = cache(lambda measure: history_digest("text", given[:measure]))
    for reply in sorted(known, key=lambda each: -each.measure):
        # The drawn tokens hold the stop string too, so it must not come a second time.
        rest = given[reply.measure :]
        if not rest or not rest.startswith(reply.tail):
            continue
        if digest(reply.measure) == reply.digest:
            behind = tokenizer.encode(rest[len(reply.tail) :], control_tokens=True)
            return Prompt(tokens=[*reply.tokens, *behind], parent=reply)
    tokens = tokenizer.encode(
        given, add_special_tokens=request.add_special_tokens, control_tokens=True
    )
    return Prompt(tokens=tokens)


def _after_reply(
    tokenizer: Tokenizer, request: ChatRequest, messages: list[dict[str, Any]], reply: CapturedReply
) -> list[int] | None:
    """Tokens of what the template writes behind a reply; None: it writes the reply's history in
    another way when more messages follow."""
    until = messages[: reply.measure]
    try:
        whole = _render(tokenizer, request, messages, is_prompt=True)
        before = _render(tokenizer, request, until, is_prompt=False)
        probe = {"role": "assistant", "content": _PROBE}
        probed = _render(tokenizer, request, [*until[:-1], probe], is_prompt=False)
    except InvalidRequestError:
        return None
    closing = probed.rpartition(_PROBE)[2]
    if _PROBE not in probed or not before.endswith(closing) or not whole.startswith(before):
        return None
    if until[-1]["content"].strip() not in before:
        # The template drops a part of the reply, such as its thoughts.
        return None
    behind = tokenizer.encode(closing + whole[len(before) :], control_tokens=True)
    ends = tokenizer.end_tokens
    if reply.drawn and reply.drawn[-1] in ends:
        written = tokenizer.encode(closing, control_tokens=True)
        first = next((at for at, token in enumerate(written) if token in ends), -1)
        del behind[: first + 1]
    return behind


def _render(
    tokenizer: Tokenizer, request: ChatRequest, messages: list[dict[str, Any]], *, is_prompt: bool
) -> str:
    return tokenizer.chat_text(
        messages,
        tools=request.offered_tools,
        add_generation_prompt=is_prompt,
        chat_template=request.chat_template,
        variables=request.chat_template_kwargs,
    )
