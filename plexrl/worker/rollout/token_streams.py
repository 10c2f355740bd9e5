"""Tokens of streamed generations, for whoever wants to read along.

Readers ask, and are answered when there is something behind what they have read. So nobody is sent
more than was asked for: a slow reader holds up nothing and finds more at once, and what is kept of
a generation is what its result holds anyway, however many read it.
"""

import uuid
from array import array
from collections import OrderedDict
from typing import Any

import numpy as np

from plexrl.errors import InvalidRequestError
from plexrl.wire.tensors import Array
from plexrl.worker.process.server import Connection

TOKENS_MAX = 4096
"""In one answer."""
READERS_MAX = 1024
"""That wait; the oldest are told that there is nothing yet, and ask again."""
ENDED_MAX = 1024
"""Generations that are remembered to have ended, for readers that ask a moment later."""

Plain = dict[str, Any]


class TokenLog:
    """The tokens of one run of a generation, in the order in which they were drawn."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex[:12]
        """Nobody else's: a generation that is begun anew after a fault has another."""
        self._rows = array("i")
        self._tokens = array("i")
        self._logprobs = array("f")

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: int, tokens: list[int], logprobs: list[float]) -> None:
        """Take in tokens of one row."""
        self._rows.extend([row] * len(tokens))
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs)

    def read(self, after: int) -> Plain:
        """At most `TOKENS_MAX` tokens behind position `after`, by row; `next` is the position
        behind them."""
        end = min(len(self), after + TOKENS_MAX)
        found: dict[int, tuple[list[int], list[float]]] = {}
        for place in range(after, end):
            tokens, logprobs = found.setdefault(self._rows[place], ([], []))
            tokens.append(self._tokens[place])
            logprobs.append(self._logprobs[place])
        rows = [[row, tokens, logprobs] for row, (tokens, logprobs) in found.items()]
        return {"stream": self.name, "next": end, "rows": rows}

    def order(self) -> Array:
        """The row of every token, int32 `[drawn]`: with the result it tells the stream again."""
        return np.array(self._rows, dtype=np.int32)


class TokenStreams:
    """Logs of the generations under way, and the readers that wait for them."""

    def __init__(self) -> None:
        self._logs: dict[str, TokenLog | None] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        # By the reader's own name: one that asks again takes back what it asked before.
        self._waiting: OrderedDict[str, tuple[Connection, Plain]] = OrderedDict()

    def begin(self, operation: str, *, streamed: bool) -> TokenLog | None:
        """A generation begins; its log, if it keeps one."""
        log = self._logs[operation] = TokenLog() if streamed else None
        self._ended.pop(operation, None)
        return log

    def end(self, operation: str) -> TokenLog | None:
        """A generation is over: its readers are told to look at the result."""
        log = self._logs.pop(operation, None)
        self._ended[operation] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        for reader, (connection, header) in list(self._waiting.items()):
            if header["operation"] == operation:
                del self._waiting[reader]
                _answer(connection, header, {"ended": True})
        return log

    def read(self, connection: Connection, header: Plain) -> None:
        """Answer a reader now, or once there is something for it; also of a generation that is yet
        to begin.

        Raises:
            InvalidRequestError: the generation is not streamed.
        """
        if self._logs.get(header["operation"], header) is None:
            raise InvalidRequestError(
                f"operation {header['operation']!r} was not submitted with `stream`, so its tokens "
                "come with its result only"
            )
        self._waiting.pop(header["reader"], None)
        if header["operation"] in self._ended:
            _answer(connection, header, {"ended": True})
            return
        self._waiting[header["reader"]] = connection, header
        if len(self._waiting) > READERS_MAX:
            _, (oldest, asked) = self._waiting.popitem(last=False)
            _answer(oldest, asked, {"nothing": True})
        self.serve()

    def serve(self) -> None:
        """Answer all readers that there is something for."""
        for reader, (connection, header) in list(self._waiting.items()):
            log = self._logs.get(header["operation"])
            if log is None:
                continue
            after = header["after"] if header["stream"] == log.name else 0
            if after < len(log):
                del self._waiting[reader]
                _answer(connection, header, log.read(after))


def _answer(connection: Connection, header: Plain, answer: Plain) -> None:
    connection.send({"reply": "answer", "operation": header["ask"], "token": 0, "answer": answer})
