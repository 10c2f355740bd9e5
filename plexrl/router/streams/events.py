"""What a reader of a generation's tokens is told, and how it says where it has got to. Pure.

An event is a JSON object. `{"cursor", "rows": [{"sample", "tokens", "logprobs"}, …]}` brings
tokens, and the cursor that goes on behind them; `sample` counts from 0 over all prompts.
`{"restart": true}` voids what came before: the generation was begun anew after a fault.
`{"waiting": true}` says that there is nothing yet. The last one is `{"done": true}` or
`{"error": …}`.

As server-sent events the same objects are `data`, the cursor is `id`, and an event's name is its
first key but for tokens (`tokens`); as JSON lines they are as they are.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.wire.tensors import Arrays

TOKENS_MAX = 4096
"""In one event."""

Plain = dict[str, Any]

WAITING: Plain = {"waiting": True}
RESTART: Plain = {"restart": True}
DONE: Plain = {"done": True}


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the stream of one run of a generation."""

    stream: str = ""
    """Names the run; empty: none was seen yet."""
    position: int = 0
    """Tokens before it."""

    def __str__(self) -> str:
        return f"{self.stream}.{self.position}"


def read_cursor(text: str) -> Cursor:
    """The cursor that `str` wrote; of an empty text the beginning. Raises `InvalidRequestError`."""
    if not text:
        return Cursor()
    stream, dot, position = text.rpartition(".")
    if not (dot and stream.isalnum() and stream.isascii() and position.isdecimal()):
        raise InvalidRequestError(
            f"{text[:100]!r} is no place in a stream: send the cursor (or Last-Event-ID) of the "
            "last event, as it was"
        )
    # A longer number than any stream has tokens is behind its end as well.
    return Cursor(stream, int(position[:18]))


def tokens_event(cursor: Cursor, rows: list[Any]) -> Plain:
    """Of `[sample, tokens, logprobs]` of each row."""
    named = [
        {"sample": sample, "tokens": tokens, "logprobs": logprobs}
        for sample, tokens, logprobs in rows
    ]
    return {"cursor": str(cursor), "rows": named}


def told_again(cursor: Cursor, stream: str, arrays: Arrays) -> Iterator[Plain]:
    """The events behind `cursor` of a generation that has finished, from its result.

    Raises:
        InvalidRequestError: it was not streamed.
    """
    if "stream_order" not in arrays:
        raise InvalidRequestError(
            "the operation was not submitted with `stream`, so its tokens come with its result only"
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
    """An event as a line of JSON."""
    return json.dumps(event).encode() + b"\n"


def server_sent(event: Plain) -> bytes:
    """An event as a browser's `EventSource` reads it."""
    name = "tokens" if "rows" in event else next(iter(event))
    head = f"id: {event['cursor']}\n" if "cursor" in event else ""
    return f"{head}event: {name}\ndata: {json.dumps(event)}\n\n".encode()
