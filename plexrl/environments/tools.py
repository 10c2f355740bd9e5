"""Plain functions as tools: the model calls them in its replies, and reads what they return."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from plexrl.environments.environment import Observation, Step
from plexrl.model.text.tool_calls import CALL_END, split_calls

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in a reply."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """A question, and how its answer is scored."""

    prompt: Observation
    score: Callable[[str], float]
    """Maps the last reply, which calls no tool, to a reward. Called in threads."""


def read_tool_calls(reply: str) -> list[ToolCall]:
    """The calls in a reply as models of the Qwen and Hermes families write them:
    `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. A call that cannot be read is none."""
    found = []
    for call in split_calls(reply)[1]:
        arguments = json.loads(call.arguments)
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                continue
        if isinstance(arguments, dict):
            found.append(ToolCall(call.name, arguments))
    return found


class ToolEnvironment:
    """A task with tools. A reply with calls is answered by what the functions return, and the first
    reply without any is the answer to the task, which is scored."""

    def __init__(
        self,
        task: Task,
        functions: Sequence[Callable[..., object]] = (),
        *,
        read_calls: Callable[[str], Sequence[ToolCall]] = read_tool_calls,
        stops: Sequence[str] = (CALL_END,),
    ) -> None:
        """`task` is asked first. `functions` are called by name; what one returns is written as a
        message of the role `tool`, and the text of an error in its place. `read_calls` finds the
        calls in a reply, which ends at any of `stops`."""
        self._task = task
        self._functions = {function.__name__: function for function in functions}
        self._read_calls = read_calls
        self.stops: Sequence[str] = tuple(stops) if functions else ()

    def reset(self) -> Observation:
        """As `Environment.reset`."""
        return self._task.prompt

    def step(self, reply: str) -> Step:
        """As `Environment.step`."""
        calls = self._read_calls(reply) if self._functions else ()
        if not calls:
            return Step(reward=float(self._task.score(reply)), done=True)
        return Step(
            observation=[
                {"role": "tool", "name": call.name, "content": self._answer(call)} for call in calls
            ]
        )

    def _answer(self, call: ToolCall) -> str:
        if call.name not in self._functions:
            return f"error: there is no tool {call.name}; there are {', '.join(self._functions)}"
        try:
            return str(self._functions[call.name](**call.arguments))
        except Exception as error:
            # A model that calls a tool wrongly reads why, and may call it again.
            return f"error: {type(error).__name__}: {error}"


def tool_schema(function: Callable[..., object]) -> dict[str, Any]:
    """The JSON schema of a function for `ChatText(tools=…)`: its name, its docstring, and its
    annotated parameters. Parameters without a default are required."""
    parameters, hints = inspect.signature(function).parameters, get_type_hints(function)
    properties = {
        name: {"type": JSON_TYPES.get(hints.get(name, str), "object")} for name in parameters
    }
    required = [name for name, each in parameters.items() if each.default is each.empty]
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": inspect.getdoc(function) or "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }
