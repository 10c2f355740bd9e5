"""Events of a token stream, and the cursor with which a reader continues. Pure.

An event is a JSON object. `{"cursor", "rows": [{"sample", "tokens", "logprobs"}, …]}` carries
tokens, and the cursor to continue after them; `sample` counts from 0 over all prompts.
`{"restart": true}` voids the tokens so far: the generation has restarted after a fault.
`{"waiting": true}` means that there are no new tokens yet. The last event is `{"done": true}` or
`{"error": …}`.

As server-sent events the objects are `data`, the cursor is `id`, and the event's name is the
object's first key, or `tokens`. As JSON lines each object is one line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.wire.tensors import Arrays

TOKENS_MAX = 4096
"""Most tokens in one event."""

Plain = dict[str, Any]

WAITING: Plain = {"waiting": True}
RESTART: Plain = {"restart": True}
DONE: Plain = {"done": True}


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the token stream of one run of a generation."""

    stream: str = ""
    """Id of the run; empty: the reader has seen none."""
    position: int = 0
    """Number of tokens before the cursor."""

    def __str__(self) -> str:
        return f"{self.stream}.{self.position}"


def read_cursor(text: str) -> Cursor:
    """Parse a cursor; an empty text is the beginning. Raises `InvalidRequestError`."""
    if not text:
        return Cursor()
    stream, dot, position = text.rpartition(".")
    if not (dot and stream.isalnum() and stream.isascii() and position.isdecimal()):
        raise InvalidRequestError(
            f"{text[:100]!r} is not a cursor: send the cursor (or Last-Event-ID) of the last event "
            "unchanged"
        )
    # A number of more digits than any stream has tokens is behind the end, too.
    return Cursor(stream, int(position[:18]))


def tokens_event(cursor: Cursor, rows: list[Any]) -> Plain:
    """The event for `[sample, tokens, logprobs]` of each row."""
    named = [
        {"sample": sample, "tokens": tokens, "logprobs": logprobs}
        for sample, tokens, logprobs in rows
    ]
    return {"cursor": str(cursor), "rows": named}


def result_events(cursor: Cursor, stream: str, arrays: Arrays) -> Iterator[Plain]:
    """The events after `cursor` of a finished generation, made from its result.

    Raises:
        InvalidRequestError: the generation was submitted without `stream`.
    """
    if "stream_order" not in arrays:
        raise InvalidRequestError(
            "the operation was submitted without `stream`: read the tokens from its result"
        )
    order, lengths = arrays["stream_order"], arrays["lengths"].astype(np.int64)
    if cursor.stream not in ("", stream):
        yield RESTART
    position = min(cursor.position, len(order)) if cursor.stream == stream else 0
    read = np.bincount(order[:position], minlength=len(lengths))
    starts = np.cumsum(lengths) - lengths
    while position < len(order):
        window = order[position : position + TOKENS_MAX]
        position += len(window)
        rows = []
        for row in dict.fromkeys(window.tolist()):
            first = int(starts[row] + read[row])
            count = int((window == row).sum())
            part = slice(first, first + count)
            read[row] += count
            rows.append([row, arrays["tokens"][part].tolist(), arrays["logprobs"][part].tolist()])
        yield tokens_event(Cursor(stream, position), rows)


def json_line(event: Plain) -> bytes:
    """Encode an event as a line of JSON."""
    return json.dumps(event).encode() + b"\n"


def server_sent(event: Plain) -> bytes:
    """Encode an event for a browser's `EventSource`."""
    name = "tokens" if "rows" in event else next(iter(event))
    head = f"id: {event['cursor']}\n" if "cursor" in event else ""
    return f"{head}event: {name}\ndata: {json.dumps(event)}\n\n".encode()
