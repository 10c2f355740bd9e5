"""Events of a token stream, and the cursor with which a reader continues. Pure.

An event is a JSON object. `{"cursor", "rows": [{"sample", "tokens", "logprobs"}, …]}` carries
tokens, and the cursor to continue after them; `sample` counts from 0 over all prompts. In a stream
of rows each sample comes once, when it has ended, and has two fields more: `finish_reason`, and
`weights`, which is `[start, version, trainer_step]` of each span of its tokens (as
`plexrl.WeightsSpan`).
`{"restart": true}` voids the tokens so far: the generation has restarted after a fault.
`{"waiting": true}` means that there are no new tokens yet. The last event is `{"done": true}` or
`{"error": …}`.

As server-sent events the objects are `data`, the cursor is `id`, and the event's name is the
object's first key, or `tokens`. As JSON lines each object is one line.

Each replica of the model has a stream of its own; a cursor has a position in each.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plexrl.client.data.results import FINISH_REASONS
from plexrl.errors import InvalidRequestError
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.tensors import Array, Arrays

TOKENS_MAX = 4096
"""Most tokens in one event; a row that has ended is not split."""

StreamEvent = dict[str, Any]
"""A JSON object, as above."""

WAITING: StreamEvent = {"waiting": True}
RESTART: StreamEvent = {"restart": True}
DONE: StreamEvent = {"done": True}
REPLICAS = "~"
"""Separates the positions of replicas in a cursor."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in one replica's stream of one run of a generation."""

    stream: str = ""
    """Id of the stream; empty: the reader has seen nothing of it."""
    offset: int = 0
    """Number of tokens, or rows, before the position."""

    def __str__(self) -> str:
        return f"{self.stream}.{self.offset}" if self.stream else ""


class Cursor:
    """A position in the stream of each replica."""

    def __init__(self, positions: Sequence[StreamPosition] = ()) -> None:
        self._positions = list(positions)

    def __str__(self) -> str:
        return REPLICAS.join(map(str, self._positions))

    def __getitem__(self, replica: int) -> StreamPosition:
        return self._positions[replica] if replica < len(self._positions) else StreamPosition()

    def is_void(self, replica: int, stream: str) -> bool:
        """Whether the replica has another stream than the reader has seen: the generation has
        restarted."""
        return self[replica].stream not in ("", stream)

    def reset(self) -> None:
        """Begin anew."""
        self._positions = []

    def move(self, replica: int, position: StreamPosition) -> None:
        """Set the position in a replica's stream."""
        missing = replica + 1 - len(self._positions)
        self._positions += [StreamPosition()] * missing
        self._positions[replica] = position


def read_cursor(text: str) -> Cursor:
    """Parse a cursor; an empty text is the beginning. Raises `InvalidRequestError`."""
    return Cursor([_read_position(part, text) for part in text.split(REPLICAS)] if text else ())


def _read_position(part: str, text: str) -> StreamPosition:
    if not part:
        return StreamPosition()
    stream, dot, offset = part.rpartition(".")
    if not (dot and stream.isalnum() and stream.isascii() and offset.isdecimal()):
        raise InvalidRequestError(
            f"{text[:100]!r} is not a cursor: send the cursor (or Last-Event-ID) of the last event "
            "unchanged"
        )
    # A number of more digits than any stream has tokens is behind the end, too.
    return StreamPosition(stream, int(offset[:18]))


def tokens_event(cursor: Cursor, rows: list[Any]) -> StreamEvent:
    """The event for `[sample, tokens, logprobs]` of each row; in a stream of rows with why it ended
    (a number), its weights and, if asked for, its `sampling_logprobs`."""
    named = []
    for sample, tokens, logprobs, *ended in rows:
        row = {"sample": sample, "tokens": tokens, "logprobs": logprobs}
        if ended:
            row |= {"finish_reason": FINISH_REASONS[ended[0]], "weights": ended[1]}
            if len(ended) > 2:
                row["sampling_logprobs"] = ended[2]
        named.append(row)
    return {"cursor": str(cursor), "rows": named}


def error_event(error: ErrorView | None) -> StreamEvent:
    """The last event of a generation that failed."""
    return {"error": error}


def result_events(
    cursor: Cursor, result: Mapping[str, Any], arrays: Arrays
) -> Iterator[StreamEvent]:
    """The events after `cursor` of a finished generation, made from its result.

    Raises:
        InvalidRequestError: the generation was submitted without `stream`.
    """
    order = arrays.get("row_order", arrays.get("stream_order"))
    if order is None:
        raise InvalidRequestError(
            "the operation was submitted without `stream`: read the tokens from its result"
        )
    streams: list[tuple[int, str]] = result.get("streams", [(0, result.get("stream", ""))])
    if any(cursor.is_void(replica, stream) for replica, stream in streams):
        cursor.reset()
        yield RESTART
    counts = arrays.get("stream_counts", np.array([len(order)]))
    ends = np.cumsum(counts, dtype=np.int64)
    for (replica, stream), first, last in zip(streams, ends - counts, ends, strict=True):
        part = order[first:last]
        read = _rows if "row_order" in arrays else _tokens
        for offset, rows in read(part, min(cursor[replica].offset, len(part)), result, arrays):
            cursor.move(replica, StreamPosition(stream, offset))
            yield tokens_event(cursor, rows)


_Read = Iterator[tuple[int, list[Any]]]
"""The offset behind some rows, and the rows."""


def _tokens(order: Array, position: int, result: Mapping[str, Any], arrays: Arrays) -> _Read:
    """The tokens after a position; `order` has the row of each token."""
    del result
    lengths = arrays["lengths"].astype(np.int64)
    read = np.bincount(order[:position], minlength=len(lengths))
    starts = np.cumsum(lengths) - lengths
    while position < len(order):
        window = order[position : position + TOKENS_MAX]
        position += len(window)
        rows = []
        for row in dict.fromkeys(window.tolist()):
            first = int(starts[row] + read[row])
            count = int((window == row).sum())
            read[row] += count
            rows.append([row, *_drawn(arrays, first, count)])
        yield position, rows


def _rows(order: Array, position: int, result: Mapping[str, Any], arrays: Arrays) -> _Read:
    """The rows after a position; `order` has their order."""
    lengths = arrays["lengths"].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    spans: dict[int, list[list[int]]] = {}
    for row, *span in result.get("segments", ()):
        spans.setdefault(row, []).append(span)
    whole = [[0, result["weights_seq"], result["trainer_step"]]]
    rows: list[Any] = []
    tokens = 0
    for row in order[position:].tolist():
        count = int(lengths[row])
        first = int(starts[row])
        ended = [int(arrays["finish"][row]), spans.get(row, whole)]
        if "sampling_logprobs" in arrays:
            ended.append(arrays["sampling_logprobs"][first : first + count].tolist())
        rows.append([row, *_drawn(arrays, first, count), *ended])
        position, tokens = position + 1, tokens + count
        if tokens >= TOKENS_MAX:
            yield position, rows
            rows, tokens = [], 0
    if rows:
        yield position, rows


def _drawn(arrays: Arrays, first: int, count: int) -> tuple[list[int], list[float]]:
    part = slice(first, first + count)
    return arrays["tokens"][part].tolist(), arrays["logprobs"][part].tolist()


def json_line(event: StreamEvent) -> bytes:
    """Encode an event as a line of JSON."""
    return json.dumps(event).encode() + b"\n"


def server_sent(event: StreamEvent) -> bytes:
    """Encode an event for a browser's `EventSource`."""
    name = "tokens" if "rows" in event else next(iter(event))
    head = f"id: {event['cursor']}\n".encode() if "cursor" in event else b""
    return head + named_event(name, event)


def named_event(name: str, content: object) -> bytes:
    """One server-sent event with JSON."""
    return f"event: {name}\ndata: {json.dumps(content)}\n\n".encode()
