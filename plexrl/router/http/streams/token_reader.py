"""Reads the events of one streamed generation for one client, on any router.

While the generation runs, the reader requests the tokens after its cursor from the worker. It sends
the next request only after the client has taken the last events, so nothing accumulates for a slow
client. Once the generation has finished, the remaining events come from its result.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from plexrl.errors import InvalidRequestError, PlexRLError, StorageError, UnavailableError
from plexrl.ids import BlobRef
from plexrl.router.execution.engines import Engine, engines_of
from plexrl.router.http.streams.events import (
    DONE,
    RESTART,
    WAITING,
    Cursor,
    StreamEvent,
    StreamPosition,
    error_event,
    result_events,
    tokens_event,
)
from plexrl.router.services.authentication import Caller
from plexrl.router.services.services import RouterServices
from plexrl.wire.messages import ReadStream
from plexrl.wire.messages.views import OperationView
from plexrl.wire.messages.workers import StreamView
from plexrl.wire.operations import OperationState
from plexrl.wire.tensors import Arrays, decode_body

READ_TIMEOUT_S = 2.0
"""Longest wait for the worker, after which the reader checks the operation's state."""
PAUSE_S = 0.2
"""Pause before the next attempt while workers or the scheduler are unreachable."""


class TokenReader:
    """One reader of a token stream."""

    def __init__(
        self, services: RouterServices, caller: Caller, operation: str, cursor: Cursor
    ) -> None:
        self._services = services
        self._caller = caller
        self._operation = operation
        self._cursor = cursor
        self._name = uuid.uuid4().hex

    async def check(self) -> None:
        """Check that the operation is a generation.

        Raises:
            UnknownOperationError: there is no such operation.
            InvalidRequestError: the operation is not a generation.
        """
        view = await self._view(0.0)
        if view["kind"] != "generate":
            raise InvalidRequestError(
                f"operation {self._operation!r} is of kind {view['kind']}: only generations can be "
                "streamed"
            )

    async def events(self) -> AsyncIterator[StreamEvent]:
        """All events after the cursor; a failure is the last event."""
        try:
            while True:
                try:
                    view = await self._view(0.0)
                    if OperationState(view["state"]).is_final:
                        break
                    async for event in self._worker_events(view["deployment"]):
                        yield event
                except (UnavailableError, StorageError):
                    # The generation outlives a restart of the scheduler, and so does the stream.
                    await asyncio.sleep(PAUSE_S)
                yield WAITING
            if view["state"] != OperationState.FINISHED:
                yield error_event(view["error"])
                return
            for event in result_events(self._cursor, *await self._result(view)):
                yield event
            yield DONE
        except PlexRLError as error:
            yield error_event(error.to_wire())

    async def _view(self, timeout_s: float) -> OperationView:
        return await self._services.operation(self._caller, self._operation, timeout_s)

    async def _result(self, view: OperationView) -> tuple[dict[str, Any], Arrays]:
        """Values and arrays of a finished generation."""
        if view["result"] is None:
            return {}, {}
        _, arrays = decode_body(await self._services.blobs.read(BlobRef(view["result"])))
        return json.loads(view["result_json"]), arrays

    async def _worker_events(self, deployment: str) -> AsyncIterator[StreamEvent]:
        """Events from the workers that lead replicas, until none has any for a while."""
        engines = engines_of(await self._services.deployment(self._caller, deployment))
        if not engines:
            await asyncio.sleep(PAUSE_S)
            return
        # The worker that has ended has reported its result; the scheduler receives it in a moment.
        final: asyncio.Task[OperationView] | None = None
        reads = {self._read(replica, engine): replica for replica, engine in enumerate(engines)}
        try:
            while reads:
                waits = [*reads, *([] if final is None else [final])]
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if final in done:
                    return
                for task in [read for read in reads if read in done]:
                    replica = reads.pop(task)
                    found = task.result()
                    if "rows" in found:
                        for event in self._taken(replica, found):
                            yield event
                        reads[self._read(replica, engines[replica])] = replica
                    elif "ended" in found and final is None:
                        final = asyncio.create_task(self._view(READ_TIMEOUT_S))
            if final is not None:
                await final
        finally:
            tasks = [*reads, *([] if final is None else [final])]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _taken(self, replica: int, found: StreamView) -> Iterator[StreamEvent]:
        """The events for what a worker has replied."""
        if self._cursor.is_void(replica, found["stream"]):
            self._cursor.reset()
            yield RESTART
        self._cursor.move(replica, StreamPosition(found["stream"], found["next"]))
        yield tokens_event(self._cursor, found["rows"])

    def _read(self, replica: int, engine: Engine) -> "asyncio.Task[StreamView]":
        return asyncio.create_task(self._reply(engine, self._cursor[replica]))

    async def _reply(self, engine: Engine, position: StreamPosition) -> StreamView:
        """A worker's reply: `rows`, `ended`, or nothing."""
        try:
            found: StreamView = await self._services.engines.request(
                engine,
                ReadStream(
                    operation=self._operation,
                    reader=self._name,
                    stream=position.stream,
                    after=position.offset,
                ),
                READ_TIMEOUT_S,
            )
        except UnavailableError as error:
            if error.details["is_gone"]:
                await asyncio.sleep(PAUSE_S)
            return {}
        if "rows" not in found and "ended" not in found:
            # The worker has too many waiting readers: pause before the next request.
            await asyncio.sleep(PAUSE_S)
        return found
