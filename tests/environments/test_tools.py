"""Functions as tools."""

import pytest

from plexrl.environments import Task, ToolCall, ToolEnvironment, read_tool_calls, tool_schema

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


@pytest.fixture
def environment() -> ToolEnvironment:
    task = Task("2 + 3?", score=lambda reply: float(reply == "5"))
    return ToolEnvironment(task, [add])


def test_a_call_is_answered_and_the_first_reply_without_one_is_scored(
    environment: ToolEnvironment,
) -> None:
    assert environment.reset() == "2 + 3?"
    answered = environment.step(f"let me see {CALL}")
    assert answered.observation == [{"role": "tool", "name": "add", "content": "5"}]
    assert (answered.done, answered.reward) == (False, 0.0)
    last = environment.step("5")
    assert (last.done, last.reward) == (True, 1.0)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('{"name": "sub", "arguments": {}}', "error: there is no tool sub; there are add"),
        ('{"name": "add", "arguments": {"c": 1}}', "error: TypeError: "),
    ],
)
def test_the_model_reads_why_a_call_failed(
    environment: ToolEnvironment, call: str, error: str
) -> None:
    observation = environment.step(f"<tool_call>{call}</tool_call>").observation
    assert not isinstance(observation, str)
    (message,) = observation
    assert message["content"].startswith(error)


def test_without_functions_the_first_reply_is_the_answer() -> None:
    environment = ToolEnvironment(Task("?", score=len))
    assert environment.stops == ()
    assert environment.step(CALL).reward == len(CALL)


@pytest.mark.parametrize(
    "reply",
    [
        *("5", "<tool_call>{}</tool_call>", "<tool_call>[1]</tool_call>"),
        r'<tool_call>{"name": "add", "arguments": "\"{bad\""}</tool_call>',
    ],
)
def test_what_cannot_be_read_is_no_call(reply: str) -> None:
    assert read_tool_calls(reply) == []


def test_calls_are_read_with_their_arguments() -> None:
    assert read_tool_calls(CALL) == [ToolCall("add", {"a": 2, "b": 3})]


def test_the_schema_of_a_function_names_its_required_arguments() -> None:
    schema = tool_schema(add)["function"]
    assert schema["description"] == "The sum of two numbers."
    assert schema["parameters"]["properties"]["b"] == {"type": "integer"}
    assert schema["parameters"]["required"] == ["a"]
