"""Observations as tokens: what the model has read and drawn is only appended to."""

import pytest

import plexrl
from plexrl.environments import ChatText, PlainText
from plexrl.model.text.tokenizer import vocabulary_files

VOCABULARY = "abcdefghijklmnopqrstuvwxyz 0123456789:.\n"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> plexrl.Tokenizer:
    files = vocabulary_files(VOCABULARY)
    files["generation_config.json"] = files["config.json"]
    return plexrl.Tokenizer.from_files({**files, "chat_template.jinja": TEMPLATE})


@pytest.fixture(scope="module")
def chat(tokenizer: plexrl.Tokenizer) -> ChatText:
    return ChatText(tokenizer)


def test_plain_text_writes_observations_one_behind_the_other(tokenizer: plexrl.Tokenizer) -> None:
    text = PlainText(tokenizer)
    answers = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "2"}]
    assert tokenizer.decode(text.begin("a: ")) == "a: "
    assert tokenizer.decode(text.follow([5], answers)) == "42"
    assert text.read([*tokenizer.encode("so 42"), plexrl.EOS]) == "so 42"


def test_a_chat_goes_on_as_the_template_writes_the_whole(
    tokenizer: plexrl.Tokenizer, chat: ChatText
) -> None:
    asked = [{"role": "user", "content": "hi"}]
    answer = [{"role": "tool", "content": "42"}]
    drawn = [*tokenizer.encode("call"), plexrl.EOS]
    tokens = [*chat.begin(asked), *drawn, *chat.follow(drawn, answer)]
    whole = [*asked, {"role": "assistant", "content": "call"}, *answer]
    assert tokens == tokenizer.apply_chat_template(whole, add_generation_prompt=True).tokens


def test_a_reply_without_an_end_token_gets_the_template_s(
    tokenizer: plexrl.Tokenizer, chat: ChatText
) -> None:
    drawn = tokenizer.encode("call")
    behind = chat.follow(drawn, "go on")
    assert behind[0] == plexrl.EOS
    assert tokenizer.decode(behind) == "\nuser: go on\nassistant: "


def test_a_chat_reads_a_reply_without_its_end(tokenizer: plexrl.Tokenizer, chat: ChatText) -> None:
    assert chat.read([*tokenizer.encode("abc"), plexrl.EOS]) == "abc"
    assert chat.read(tokenizer.encode("abc")) == "abc"


def test_an_observation_may_have_any_text() -> None:
    files = vocabulary_files(VOCABULARY + "PLEXR-Y")
    wide = plexrl.Tokenizer.from_files({**files, "chat_template.jinja": TEMPLATE})
    behind = ChatText(wide).follow([5], "see PLEXRL-REPLY- here")
    assert wide.decode(behind) == "\nuser: see PLEXRL-REPLY- here\nassistant: "
