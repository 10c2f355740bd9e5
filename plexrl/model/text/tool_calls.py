"""Calls of tools in the text of a reply, as models of the Qwen and Hermes families write them."""

import json
import re
from dataclasses import dataclass
from typing import Any

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
"""What models of the Hermes and Qwen families write around a call, which is JSON with `name` and
`arguments`."""

_BEGIN = re.compile(rf"{CALL_BEGIN}\s*(?=\{{)")
_END = re.compile(rf"\}}\s*{CALL_END}")


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call of a tool in a reply."""

    name: str
    arguments: str
    """JSON."""


def split_calls(text: str) -> tuple[str, list[FoundCall]]:
    """The text before the first call, and the calls. A text with a call that cannot be read, or
    with text between and behind calls, has none: nothing of it is lost."""
    calls: list[FoundCall] = []
    first, end = len(text), 0
    while (begun := _BEGIN.search(text, end)) is not None:
        ended = _END.search(text, begun.end())
        call = None if ended is None else _read_call(text[begun.end() : ended.start() + 1])
        if ended is None or call is None or (calls and text[end : begun.start()].strip()):
            return text, []
        first, end = min(first, begun.start()), ended.end()
        calls.append(call)
    if not calls or text[end:].strip():
        return text, []
    return text[:first].rstrip(), calls


def _read_call(text: str) -> FoundCall | None:
    try:
        plain: dict[str, Any] = json.loads(text)
        name, arguments = plain.get("name"), plain.get("arguments", {})
        if not isinstance(name, str):
            return None
        if isinstance(arguments, str):
            json.loads(arguments)
        else:
            arguments = json.dumps(arguments, ensure_ascii=False)
        # Half of a surrogate pair can be escaped in JSON, but not be sent.
        f"{name}{arguments}".encode()
    except (ValueError, RecursionError):
        return None
    return FoundCall(name, arguments)
