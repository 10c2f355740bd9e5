"""Futures of generations, which can stream their tokens."""

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from plexrl.client.calls.transport import (
    AsyncTransport,
    Call,
    RetryTimer,
    Transport,
    is_unavailable,
)
from plexrl.client.data.results import Chunk, Decoder, GenerateResult, Sample, WeightsSpan
from plexrl.client.futures.futures import AsyncFuture, Future
from plexrl.errors import ExecutionError, InvalidRequestError, PlexRLError, from_wire
from plexrl.wire.messages.views import OperationView

LOG = logging.getLogger(__name__)

RETRIABLE = frozenset({429, 502, 503, 504, 507})
"""Statuses after which the stream is requested again, unless they are the operation's own error."""


def stream_call(operation: str, cursor: str) -> Call:
    """The request for what comes after the cursor in a generation's stream."""
    path = f"/v1/operations/{quote(operation, safe='')}/stream"
    return Call(method="GET", path=path, query={"after": cursor})


ReadT = TypeVar("ReadT")
FinishedSample = tuple[int, int, Sample]
"""Index of the prompt, index of the sample among the prompt's, and the sample."""


def ended_sample(
    tokens: list[int],
    logprobs: list[float],
    finish_reason: str,
    weights: list[list[int]],
    sampling_logprobs: list[float] | None = None,
) -> Sample:
    """The sample of a row that has ended, as a stream of rows gives it."""
    import numpy as np

    spans = tuple(WeightsSpan(*weight) for weight in weights)
    drawn_by = None
    if sampling_logprobs is not None:
        drawn_by = np.array(sampling_logprobs, dtype=np.float32)
    return Sample(tokens, np.array(logprobs, dtype=np.float32), finish_reason, spans, drawn_by)


class StreamState(ABC, Generic[ReadT]):
    """A reader's position in a stream. No I/O: both kinds of future use it."""

    def __init__(self, operation: str, samples_per_prompt: int) -> None:
        self._operation = operation
        self._samples = samples_per_prompt
        self._cursor = ""
        self.is_done = False

    def call(self) -> Call:
        """The request for the tokens after the cursor."""
        return stream_call(self._operation, self._cursor)

    def take(self, line: str) -> list[ReadT]:
        """Return what one line has.

        Raises:
            PlexRLError: the operation's own error.
            ExecutionError: the generation restarted after a fault and draws other tokens.
        """
        event: dict[str, Any] = json.loads(line) if line else {}
        if "error" in event:
            self.is_done = True
            raise from_wire(event["error"])
        if "restart" in event:
            self._restarted()
        self.is_done = "done" in event
        if "rows" not in event:
            return []
        found = [self._read(**row) for row in event["rows"]]
        self._cursor = event["cursor"]
        return [each for each in found if each is not None]

    def _restarted(self) -> None:
        """All rows come again."""

    @abstractmethod
    def _read(
        self, sample: int, tokens: list[int], logprobs: list[float], **ended: Any
    ) -> ReadT | None:
        """The new part of a row of an event."""

    def _other_tokens(self, sample: int) -> ExecutionError:
        return ExecutionError(
            f"operation {self._operation!r} restarted after a fault and draws other tokens of "
            f"sample {sample}: drop what was streamed of it and read the result"
        )


class TokenStream(StreamState[Chunk]):
    """A stream of tokens as they are drawn."""

    def __init__(self, operation: str, samples_per_prompt: int) -> None:
        super().__init__(operation, samples_per_prompt)
        # Tokens of each row from the current run, and tokens of former runs yet to be repeated.
        self._seen: dict[int, list[int]] = {}
        self._repeats: dict[int, list[int]] = {}

    def _restarted(self) -> None:
        # This run may end, too, before it has repeated all tokens.
        for row, tokens in self._seen.items():
            self._repeats[row] = tokens + self._repeats.get(row, [])
        self._seen = {}

    def _read(
        self, sample: int, tokens: list[int], logprobs: list[float], **ended: Any
    ) -> Chunk | None:
        del ended
        expected = self._repeats.get(sample, [])
        again = min(len(expected), len(tokens))
        if tokens[:again] != expected[:again]:
            raise self._other_tokens(sample)
        del expected[:again]
        self._seen.setdefault(sample, []).extend(tokens)
        if again == len(tokens):
            return None
        prompt, which = divmod(sample, self._samples)
        return Chunk(prompt, which, tokens[again:], logprobs[again:])


class SampleStream(StreamState[FinishedSample]):
    """A stream of samples, each of which comes when it has ended."""

    def __init__(self, operation: str, samples_per_prompt: int) -> None:
        super().__init__(operation, samples_per_prompt)
        self._seen: dict[int, list[int]] = {}

    def _read(
        self, sample: int, tokens: list[int], logprobs: list[float], **ended: Any
    ) -> FinishedSample | None:
        if not ended:
            raise InvalidRequestError(
                f"operation {self._operation!r} streams tokens: submit it with stream='rows' to "
                "read whole samples"
            )
        if sample in self._seen:
            if tokens != self._seen[sample]:
                raise self._other_tokens(sample)
            return None
        self._seen[sample] = tokens
        made = ended_sample(tokens, logprobs, **ended)
        return (*divmod(sample, self._samples), made)


class GenerateFuture(Future[GenerateResult]):
    """The samples of a `generate`."""

    def __init__(
        self, transport: Transport, view: OperationView, decoder: Decoder, samples: int
    ) -> None:
        super().__init__(transport, view, decoder)
        self._samples = samples

    def interrupt(self, timeout_s: float | None = None) -> GenerateResult:
        """End the generation now and return its samples, after at most `timeout_s` seconds if
        given. Unfinished samples have the finish reason `abort` and the tokens drawn so far; a
        finished generation stays as it is.

        Raises:
            OperationCancelledError: the generation had not begun, and never runs.
            DeadlineExceededError: no result after `timeout_s` seconds; the generation still ends.
        """
        self.cancel()
        return self.result(timeout_s)

    def stream(self) -> Iterator[Chunk]:
        """Yield the tokens of a generation submitted with `stream=True`, from its start.

        After a lost connection the stream continues on any router; no token comes twice. The
        generation continues if you stop reading.

        Raises:
            PlexRLError: the operation failed; this is its own error.
        """
        return self._follow(TokenStream(self.operation, self._samples))

    def samples(self) -> Iterator[FinishedSample]:
        """Yield (index of the prompt, index of the sample, `Sample`) of a generation submitted with
        `stream="rows"`, each sample when it has ended.

        Raises as `stream`.
        """
        return self._follow(SampleStream(self.operation, self._samples))

    def _follow(self, reading: StreamState[ReadT]) -> Iterator[ReadT]:
        timer = RetryTimer(self._transport.timeout_s)
        while not reading.is_done:
            try:
                for line in self._transport.lines(reading.call()):
                    yield from reading.take(line)
                    timer = RetryTimer(self._transport.timeout_s)
            except PlexRLError as error:
                time.sleep(_pause_s(reading, error, timer))


class AsyncGenerateFuture(AsyncFuture[GenerateResult]):
    """Like `GenerateFuture`, for `await`."""

    def __init__(
        self, transport: AsyncTransport, view: OperationView, decoder: Decoder, samples: int
    ) -> None:
        super().__init__(transport, view, decoder)
        self._samples = samples

    async def interrupt(self, timeout_s: float | None = None) -> GenerateResult:
        """As `GenerateFuture.interrupt`."""
        await self.cancel()
        return await self.result(timeout_s)

    def stream(self) -> AsyncIterator[Chunk]:
        """As `GenerateFuture.stream`."""
        return self._follow(TokenStream(self.operation, self._samples))

    def samples(self) -> AsyncIterator[FinishedSample]:
        """As `GenerateFuture.samples`."""
        return self._follow(SampleStream(self.operation, self._samples))

    async def _follow(self, reading: StreamState[ReadT]) -> AsyncIterator[ReadT]:
        timer = RetryTimer(self._transport.timeout_s)
        while not reading.is_done:
            try:
                async for line in self._transport.lines(reading.call()):
                    for chunk in reading.take(line):
                        yield chunk
                    timer = RetryTimer(self._transport.timeout_s)
            except PlexRLError as error:
                await asyncio.sleep(_pause_s(reading, error, timer))


def _pause_s(reading: StreamState[Any], error: PlexRLError, timer: RetryTimer) -> float:
    """Seconds before the stream is requested again. Raises `error` if a retry cannot help."""
    if reading.is_done or error.status not in RETRIABLE:
        raise error
    LOG.info("the stream broke (%s); requesting it again", error)
    return timer.pause_s(error, unbounded=is_unavailable(error))
