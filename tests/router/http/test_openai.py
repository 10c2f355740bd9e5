"""Prompts, replies and segments of the OpenAI-compatible endpoints, without a cluster."""

from typing import Any

import msgspec
import numpy as np
import pytest

from plexrl.client.blocking.deployment import OpenAIAccess
from plexrl.client.data.results import GenerateResult, Sample, WeightsSpan
from plexrl.errors import InvalidRequestError
from plexrl.model.text.tokenizer import EOS, Tokenizer, vocabulary_files
from plexrl.model.text.tool_calls import CALL_BEGIN, CALL_END, split_calls
from plexrl.router.http.openai.prompts import (
    canonical,
    chat_prompt,
    chat_settings,
    text_prompt,
)
from plexrl.router.http.openai.requests import ChatRequest, CompletionRequest
from plexrl.router.http.openai.texts import GrowingText
from plexrl.router.http.openai.trajectory import (
    CallHistory,
    decode_calls,
    history_digest,
    make_call,
    replies,
    segments,
)

APPENDS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DROPS = APPENDS.replace("m.content", "m.content.split(':')[-1]")
SPACED = APPENDS.replace("<eos>", " <eos>")
REWRITES = APPENDS.replace("{{ m.content }}", "{{ m.content if loop.last else 'dropped' }}")
TOKENIZER = Tokenizer.from_files(
    {
        **vocabulary_files("abcdefghijklmnopqrstuvwxyz :\n"),
        "chat_template.jinja": APPENDS,
        "additional_chat_templates/rewrites.jinja": REWRITES,
        "additional_chat_templates/drops.jinja": DROPS,
        "additional_chat_templates/spaced.jinja": SPACED,
    }
)
COMPLETION = CompletionRequest.model_validate(
    {"model": "actor", "prompt": "", "add_special_tokens": False}
)
USER = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "ab"}
TOOL = {"role": "tool", "content": "result"}


def request(*messages: dict[str, Any], template: str | None = None) -> ChatRequest:
    return made(messages=list(messages), chat_template=template)


def made(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "actor", "messages": [USER], **fields})


def captured(
    tokens: list[int], template: str | None = None, reply: dict[str, Any] = REPLY
) -> tuple[list[int], list[bytes]]:
    """A prompt, and its captured call with this reply."""
    first = request(USER, template=template)
    prompt = chat_prompt(TOKENIZER, first)
    sample = Sample(tokens, np.full(len(tokens), -0.5, np.float32), "stop", (WeightsSpan(0, 2, 5),))
    history = canonical([USER, reply])
    digest = history_digest("chat", history, chat_settings(first))
    result = GenerateResult([[sample]], 2)
    call = make_call("one", 1.0, None, prompt.tokens, result, histories=[CallHistory(2, digest)])
    return prompt.tokens, [msgspec.json.encode(call)]


@pytest.mark.parametrize("is_ended", [True, False])
def test_a_later_prompt_begins_with_the_drawn_tokens(is_ended: bool) -> None:
    # The reply's text could also be encoded as other tokens; only the drawn ones may be used.
    drawn = [*TOKENIZER.encode("ab"), *([EOS] if is_ended else [])]
    before, rows = captured(drawn)
    known = replies(decode_calls(rows))
    found = chat_prompt(TOKENIZER, request(USER, {**REPLY, "refusal": None}, TOOL), known)
    assert found.parent == known[0]
    closing = "\ntool: result\nassistant: "
    ended = [] if is_ended else [EOS]
    assert found.tokens == [*before, *drawn, *ended, *TOKENIZER.encode(closing)]
    alone = chat_prompt(TOKENIZER, request(USER, REPLY, TOOL))
    assert alone.parent is None
    assert alone.tokens == found.tokens, "the template alone writes the same text"


@pytest.mark.parametrize(
    "messages",
    [
        (USER, {**REPLY, "content": "another"}, TOOL),
        ({**USER, "content": "other"}, REPLY, TOOL),
        (USER,),
    ],
)
def test_another_history_continues_nothing(messages: tuple[dict[str, Any], ...]) -> None:
    known = replies(decode_calls(captured(TOKENIZER.encode("ab"))[1]))
    assert chat_prompt(TOKENIZER, request(*messages), known).parent is None


def test_a_template_that_rewrites_earlier_turns_begins_another_segment() -> None:
    known = replies(decode_calls(captured(TOKENIZER.encode("ab"), "rewrites")[1]))
    found = chat_prompt(TOKENIZER, request(USER, REPLY, TOOL, template="rewrites"), known)
    assert found.parent is None


def test_a_template_that_drops_thoughts_begins_another_segment() -> None:
    thought = {**REPLY, "content": "thought:ab"}
    known = replies(decode_calls(captured(TOKENIZER.encode("thought:ab"), "drops", thought)[1]))
    found = chat_prompt(TOKENIZER, request(USER, thought, TOOL, template="drops"), known)
    assert found.parent is None


def test_a_drawn_end_token_comes_once_however_the_template_writes_it() -> None:
    drawn = [*TOKENIZER.encode("ab"), EOS]
    before, rows = captured(drawn, "spaced")
    known = replies(decode_calls(rows))
    found = chat_prompt(TOKENIZER, request(USER, REPLY, TOOL, template="spaced"), known)
    behind = TOKENIZER.encode("\ntool: result\nassistant: ")
    assert found.tokens == [*before, *drawn, *behind]


def test_a_template_of_the_client_is_not_rendered() -> None:
    for template in ("{{ 'a' * 9 }}", APPENDS, ""):
        with pytest.raises(InvalidRequestError, match="the model's own templates"):
            chat_prompt(TOKENIZER, request(USER, template=template))


def test_segments_join_the_turns_of_each_branch() -> None:
    before, rows = captured([3, 4, EOS])
    (reply,) = replies(decode_calls(rows))
    prompt = [*reply.tokens, 7, 8]
    samples = [
        Sample([token, EOS], np.array([-1, -2], np.float32), "stop", (WeightsSpan(0, 3, 6),))
        for token in (5, 6)
    ]
    second = make_call(
        "two",
        2.0,
        reply,
        prompt,
        GenerateResult([samples], 3),
        histories=[CallHistory(4, "x"), CallHistory(4, "y")],
    )
    rows.append(msgspec.json.encode(second))
    left, right = segments(decode_calls(rows))
    assert left["tokens"] == [*prompt, 5, EOS]
    assert right["tokens"] == [*prompt, 6, EOS]
    assert left["mask"] == [0] * len(before) + [1, 1, 1, 0, 0, 1, 1]
    assert left["logprobs"] == [0.0] * len(before) + [-0.5, -0.5, -0.5, 0.0, 0.0, -1.0, -2.0]
    assert left["weights"] == [(len(before), 2, 5), (len(prompt), 3, 6)]
    assert left["operations"] == ["one", "two"]
    assert list(segments(decode_calls(rows[1:]))) == [], (
        "a turn without its beginning is no segment"
    )


def test_calls_of_tools_are_read_from_a_reply() -> None:
    call = f'{CALL_BEGIN}\n{{"name": "add", "arguments": {{"a": 1}}}}\n{CALL_END}'
    text, calls = split_calls(f"I add. {call}\n{call}")
    assert text == "I add."
    assert [(each.name, each.arguments) for each in calls] == [("add", '{"a": 1}')] * 2
    for broken in (f"{CALL_BEGIN}{{no json}}{CALL_END}", f"{call} and more", f"{call} x {call}"):
        assert split_calls(broken) == (broken, [])


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": "not json"}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
    ids=["text", "surrogate", "deep"],
)
def test_a_call_that_no_client_could_return_stays_text(body: str) -> None:
    text = f"{CALL_BEGIN}{body}{CALL_END}"
    assert split_calls(text) == (text, [])


def test_a_long_text_grows_as_the_whole_is_decoded() -> None:
    tokens = [*TOKENIZER.encode("ab c"), EOS] * 100
    text = GrowingText(TOKENIZER, [], holds_calls=False)
    for at in range(0, len(tokens), 3):
        text.take(tokens[at : at + 3])
        assert text.sent == TOKENIZER.decode(tokens[: at + 3])
    assert len(text.sent) == 400


def test_a_text_that_begins_anew_in_another_way_is_not_sent() -> None:
    text = GrowingText(TOKENIZER, [], holds_calls=False)
    text.take(TOKENIZER.encode("abc"))
    text.restart()
    assert text.take(TOKENIZER.encode("axcdef")) == ""
    assert text.sent == "abc"


def test_an_empty_reply_changes_no_later_request() -> None:
    prompt = text_prompt(TOKENIZER, COMPLETION, "ab")
    result = GenerateResult([[Sample([EOS], np.zeros(1, np.float32), "stop")]], 0)
    digest = history_digest("text", "ab")
    call = make_call("one", 1.0, None, prompt.tokens, result, histories=[CallHistory(2, digest)])
    again = text_prompt(TOKENIZER, COMPLETION, "ab", replies([call]))
    assert again == prompt


def test_a_drawn_stop_string_comes_once() -> None:
    prompt = TOKENIZER.encode("ab")
    drawn = TOKENIZER.encode("c::")
    result = GenerateResult([[Sample(drawn, np.zeros(3, np.float32), "stop")]], 0)
    history = CallHistory(3, history_digest("text", "abc"), tail="::")
    known = replies([make_call("one", 1.0, None, prompt, result, histories=[history])])
    found = text_prompt(TOKENIZER, COMPLETION, "abc::d", known)
    assert found.parent == known[0]
    assert found.tokens == TOKENIZER.encode("abc::d")
    for other in ("abcd", "abc:d", "abc"):
        found = text_prompt(TOKENIZER, COMPLETION, other, known)
        assert (found.parent, found.tokens) == (None, TOKENIZER.encode(other))


def test_streamed_text_is_never_taken_back() -> None:
    text = GrowingText(TOKENIZER, ["stop"], holds_calls=False)
    parts = [text.take(TOKENIZER.encode(part)) for part in ("ab s", "t", "a", " st", "op", "x")]
    assert parts == ["ab ", "", "sta", " ", "", ""]
    text = GrowingText(TOKENIZER, ["stop"], holds_calls=False)
    first = text.take(TOKENIZER.encode("abc"))
    text.restart()
    assert first + text.take(TOKENIZER.encode("abcd")) == "abcd"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "user", "content": "\ud800"},
    ],
)
def test_messages_that_cannot_be_read_are_refused(message: dict[str, Any]) -> None:
    refused = request(message)
    with pytest.raises(InvalidRequestError):
        read(refused)


def read(body: ChatRequest) -> None:
    body.check_known()
    body.conversation()


def test_a_prompt_with_half_a_character_is_refused() -> None:
    refused = COMPLETION.model_copy(update={"prompt": "\ud800"})
    with pytest.raises(InvalidRequestError, match="whole characters"):
        refused.check_known()


def test_an_endpoint_of_any_job_has_trajectories() -> None:
    url = "http://host/v1/jobs/trajectories/deployments/actor/openai"
    access = OpenAIAccess(base_url=f"{url}/v1", api_key="", model="actor")
    for name in ("one", "v1"):
        access = access.for_trajectory(name)
        assert access.base_url == f"{url}/trajectories/{name}/v1"


@pytest.mark.parametrize(
    "options", [{"presence_penalty": 0.1}, {"logit_bias": {"3": 1}}, {"response_format": {"a": 1}}]
)
def test_what_would_change_the_draws_is_refused(options: dict[str, Any]) -> None:
    refused = made(**options)
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        refused.check_known()
    made(user="me", presence_penalty=0).check_known()
