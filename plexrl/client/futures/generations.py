"""Generations from a controller's side: their tokens as they are drawn."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

from plexrl.client.calls.transport import AsyncTransport, Call, Patience, Transport, is_held
from plexrl.client.data.results import Chunk, Decoder, GenerateResult
from plexrl.client.futures.futures import AsyncFuture, Future, View
from plexrl.errors import ExecutionError, PlexRLError, from_wire

LOG = logging.getLogger(__name__)

BROKEN = frozenset({429, 502, 503, 504, 507})
"""Statuses of what may be asked again, where it is no operation's own error."""


class StreamReading:
    """Where a reader has got to, and what a line brings it. No I/O: both kinds of future use it."""

    def __init__(self, operation: str, samples_per_prompt: int) -> None:
        self._path = f"/v1/operations/{quote(operation, safe='')}/stream"
        self._operation = operation
        self._samples = samples_per_prompt
        self._cursor = ""
        # Of each row, by this run of the generation; and those that it has yet to repeat.
        self._seen: dict[int, list[int]] = {}
        self._repeats: dict[int, list[int]] = {}
        self.is_done = False

    def call(self) -> Call:
        """The request for what is yet to come."""
        return Call(method="GET", path=self._path, query={"after": self._cursor})

    def take(self, line: str) -> list[Chunk]:
        """The chunks of one line.

        Raises:
            PlexRLError: the operation's own error.
            ExecutionError: it was begun anew after a fault, and draws other tokens than before.
        """
        event: dict[str, Any] = json.loads(line) if line else {}
        if "error" in event:
            self.is_done = True
            raise from_wire(event["error"])
        if "restart" in event:
            # This run may end as well before it has repeated everything that was given.
            for row, tokens in self._seen.items():
                self._repeats[row] = tokens + self._repeats.get(row, [])
            self._seen = {}
        self.is_done = "done" in event
        if "rows" not in event:
            return []
        chunks = [self._chunk(**row) for row in event["rows"]]
        self._cursor = event["cursor"]
        return [chunk for chunk in chunks if chunk.tokens]

    def _chunk(self, sample: int, tokens: list[int], logprobs: list[float]) -> Chunk:
        expected = self._repeats.get(sample, [])
        again = min(len(expected), len(tokens))
        if tokens[:again] != expected[:again]:
            raise ExecutionError(
                f"operation {self._operation!r} was begun anew after a fault and draws other "
                f"tokens of sample {sample} than before: drop the chunks and take the result"
            )
        del expected[:again]
        self._seen.setdefault(sample, []).extend(tokens)
        prompt, which = divmod(sample, self._samples)
        return Chunk(prompt, which, tokens[again:], logprobs[again:])


class GenerateFuture(Future[GenerateResult]):
    """The samples of a `generate`."""

    def __init__(self, transport: Transport, view: View, decoder: Decoder, samples: int) -> None:
        super().__init__(transport, view, decoder)
        self._samples = samples

    def interrupt(self, timeout_s: float | None = None) -> GenerateResult:
        """End it now; returns what it has, after at most `timeout_s` seconds where they are given.
        Samples that were under way, or had not begun, have the finish reason `abort` and the tokens
        drawn so far; a generation that is over stays as it is.

        Raises:
            OperationCancelledError: it had not begun, and will not.
            DeadlineExceededError: no answer after `timeout_s` seconds; it ends all the same.
        """
        self.cancel()
        return self.result(timeout_s)

    def stream(self) -> Iterator[Chunk]:
        """Tokens as they are drawn, of a generation submitted with `stream=True`, from its start.

        A connection that breaks is made again, with any router, and no token is given twice. To
        stop reading changes nothing about the generation.

        Raises:
            PlexRLError: the operation failed; the error is its own.
        """
        reading = StreamReading(self.operation, self._samples)
        patience = Patience(self._transport.timeout_s)
        while not reading.is_done:
            try:
                for line in self._transport.lines(reading.call()):
                    yield from reading.take(line)
                    patience = Patience(self._transport.timeout_s)
            except PlexRLError as error:
                time.sleep(_pause_s(reading, error, patience))


class AsyncGenerateFuture(AsyncFuture[GenerateResult]):
    """As `GenerateFuture`: `await` it."""

    def __init__(
        self, transport: AsyncTransport, view: View, decoder: Decoder, samples: int
    ) -> None:
        super().__init__(transport, view, decoder)
        self._samples = samples

    async def interrupt(self, timeout_s: float | None = None) -> GenerateResult:
        """As `GenerateFuture.interrupt`."""
        await self.cancel()
        return await self.result(timeout_s)

    async def stream(self) -> AsyncIterator[Chunk]:
        """As `GenerateFuture.stream`."""
        reading = StreamReading(self.operation, self._samples)
        patience = Patience(self._transport.timeout_s)
        while not reading.is_done:
            try:
                async for line in self._transport.lines(reading.call()):
                    for chunk in reading.take(line):
                        yield chunk
                    patience = Patience(self._transport.timeout_s)
            except PlexRLError as error:
                await asyncio.sleep(_pause_s(reading, error, patience))


def _pause_s(reading: StreamReading, error: PlexRLError, patience: Patience) -> float:
    """Before the stream is taken up again. Raises `error` where that is of no use."""
    if reading.is_done or error.status not in BROKEN:
        raise error
    LOG.info("the stream broke (%s); taking it up again", error)
    return patience.pause_s(error, unbounded=is_held(error))
