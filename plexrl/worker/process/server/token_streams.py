"""Logs of streamed generations' tokens or rows, and the readers that wait for new ones.

A reader requests the tokens after an offset, and gets a reply when there are some (long polling).
So a slow reader delays nothing, and the memory used is that of the result, for any number of
readers.
"""

import math
import uuid
from array import array
from collections import OrderedDict
from typing import Any, Literal

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.wire.messages import ReadStream
from plexrl.wire.messages.workers import StreamView
from plexrl.wire.tensors import Array
from plexrl.worker.process.server.server import WorkerConnection

TOKENS_MAX = 4096
"""Most tokens in one reply."""
READERS_MAX = 1024
"""Most waiting readers. Beyond it the oldest get an empty reply, and request again."""
ENDED_MAX = 1024
"""Ended generations that are remembered, for readers whose requests arrive late."""


class TokenLog:
    """The tokens of one run of a generation, in the order in which they were drawn."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex[:12]
        """Unique: a generation that is restarted after a fault gets another name."""
        self._rows = array("i")
        self._tokens = array("i")
        self._logprobs = array("f")
        self._is_spoilt = False

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: int, tokens: list[int], logprobs: list[float]) -> None:
        """Append tokens of one row. From the first logprob that is not finite on nothing is
        appended: the generation will fail, and no reader may take such a number for a result."""
        self._is_spoilt = self._is_spoilt or not all(map(math.isfinite, logprobs))
        if self._is_spoilt:
            return
        self._rows.extend([row] * len(tokens))
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)

    def read(self, after: int) -> StreamView:
        """At most `TOKENS_MAX` tokens from offset `after` on, by row; `next` is the offset behind
        them."""
        end = min(len(self), after + TOKENS_MAX)
        found: dict[int, tuple[list[int], list[float]]] = {}
        for offset in range(after, end):
            tokens, logprobs = found.setdefault(self._rows[offset], ([], []))
            tokens.append(self._tokens[offset])
            logprobs.append(self._logprobs[offset])
        rows = [[row, tokens, logprobs] for row, (tokens, logprobs) in found.items()]
        return {"stream": self.name, "next": end, "rows": rows}

    def order(self) -> Array:
        """The row of every token, int32 `[drawn]`. With the result it reproduces the stream."""
        return np.array(self._rows, dtype=np.int32)


class RowLog:
    """The rows of one run of a generation, in the order in which they ended."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex[:12]
        """As `TokenLog.name`."""
        self._rows: list[list[Any]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(
        self,
        row: int,
        tokens: list[int],
        logprobs: list[float],
        finish: int,
        weights: list[list[int]],
        drawn_by: list[float] | None = None,
    ) -> None:
        """Append a row that has ended; see `EmitRow`. A row with logprobs that are not finite is no
        result: the generation will fail."""
        if all(map(math.isfinite, logprobs)):
            more = [] if drawn_by is None else [drawn_by]
            self._rows.append([row, tokens, logprobs, finish, weights, *more])

    def read(self, after: int) -> StreamView:
        """As `TokenLog.read`, for whole rows; offsets count rows."""
        rows: list[list[Any]] = []
        tokens = 0
        for row in self._rows[after:]:
            rows.append(row)
            tokens += len(row[1])
            if tokens >= TOKENS_MAX:
                break
        return {"stream": self.name, "next": after + len(rows), "rows": rows}

    def order(self) -> Array:
        """The rows in this order, int32 `[rows]`."""
        return np.array([row[0] for row in self._rows], dtype=np.int32)


Log = TokenLog | RowLog


class TokenStreams:
    """Logs of the running generations, and their waiting readers."""

    def __init__(self) -> None:
        self._logs: dict[str, Log | None] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        # By the reader's name: a new request replaces the reader's earlier one.
        self._waiting: OrderedDict[str, tuple[WorkerConnection, ReadStream]] = OrderedDict()

    def begin(self, operation: str, stream: "bool | Literal['rows']") -> Log | None:
        """Register a generation; returns its log if it is streamed, as `GenerateParams.stream`."""
        log: Log | None = None
        if stream:
            log = RowLog() if stream == "rows" else TokenLog()
        self._logs[operation] = log
        self._ended.pop(operation, None)
        return log

    def end(self, operation: str) -> Log | None:
        """Unregister a generation, and reply to its readers with the rest, or that it has ended."""
        self.serve()
        log = self._logs.pop(operation, None)
        self._ended[operation] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for reader, (connection, asked) in list(self._waiting.items()):
            if asked.operation == operation:
                del self._waiting[reader]
                connection.answer(asked.ask, {"ended": True})
        return log

    def read(self, connection: WorkerConnection, asked: ReadStream) -> None:
        """Reply to a reader now or when there are new tokens. The generation may begin later.

        Raises:
            InvalidRequestError: the generation is not streamed.
        """
        if asked.operation in self._logs and self._logs[asked.operation] is None:
            raise InvalidRequestError(
                f"operation {asked.operation!r} was submitted without `stream`: read the "
                "tokens from its result"
            )
        self._waiting.pop(asked.reader, None)
        if asked.operation in self._ended:
            connection.answer(asked.ask, {"ended": True})
            return
        self._waiting[asked.reader] = connection, asked
        if len(self._waiting) > READERS_MAX:
            _, (oldest, oldest_asked) = self._waiting.popitem(last=False)
            oldest.answer(oldest_asked.ask, {"nothing": True})
        self.serve()

    def serve(self) -> None:
        """Reply to all readers for which there are new tokens."""
        for reader, (connection, asked) in list(self._waiting.items()):
            log = self._logs.get(asked.operation)
            if log is None:
                continue
            after = asked.after if asked.stream == log.name else 0
            if after < len(log):
                del self._waiting[reader]
                connection.answer(asked.ask, {**log.read(after)})
