"""Reads the events of one streamed generation for one client, on any router.

While the generation runs, the reader requests the tokens after its cursor from the worker. It sends
the next request only after the client has taken the last events, so nothing accumulates for a slow
client. Once the generation has finished, the remaining events come from its result.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from plexrl.errors import InvalidRequestError, PlexRLError, StorageError, UnavailableError
from plexrl.ids import BlobRef
from plexrl.router.execution.engines import engines_of
from plexrl.router.http.authentication import Caller
from plexrl.router.http.services import RouterServices
from plexrl.router.streams.events import (
    DONE,
    RESTART,
    WAITING,
    Cursor,
    result_events,
    tokens_event,
)
from plexrl.wire.operations import OperationState
from plexrl.wire.tensors import decode_body

READ_TIMEOUT_S = 2.0
"""Longest wait for the worker, after which the reader checks the operation's state."""
PAUSE_S = 0.2
"""Pause before the next attempt while workers or the scheduler are unreachable."""

Plain = dict[str, Any]


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

    async def events(self) -> AsyncIterator[Plain]:
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
                yield {"error": view["error"]}
                return
            for event in result_events(self._cursor, *await self._result(view)):
                yield event
            yield DONE
        except PlexRLError as error:
            yield {"error": error.to_wire()}

    async def _view(self, timeout_s: float) -> Plain:
        return await self._services.operation(self._caller, self._operation, timeout_s)

    async def _result(self, view: Plain) -> tuple[str, Any]:
        """The stream's id and the arrays of a finished generation."""
        if view["result"] is None:
            return "", {}
        _, arrays = decode_body(await self._services.blobs.read(BlobRef(view["result"])))
        return str(json.loads(view["result_json"]).get("stream", "")), arrays

    async def _worker_events(self, deployment: str) -> AsyncIterator[Plain]:
        """Events from the worker, until it has no tokens for a while."""
        engines = engines_of(await self._services.deployment(self._caller, deployment))
        if not engines:
            await asyncio.sleep(PAUSE_S)
            return
        while True:
            try:
                found = await self._services.engines.request(
                    engines[0],
                    "read_stream",
                    READ_TIMEOUT_S,
                    operation=self._operation,
                    reader=self._name,
                    stream=self._cursor.stream,
                    after=self._cursor.position,
                )
            except UnavailableError as error:
                if error.details["is_gone"]:
                    await asyncio.sleep(PAUSE_S)
                return
            if "rows" not in found:
                if "ended" in found:
                    # The worker has reported its result; the scheduler receives it in a moment.
                    await self._view(READ_TIMEOUT_S)
                else:
                    # The worker has too many waiting readers: pause before the next request.
                    await asyncio.sleep(PAUSE_S)
                return
            if self._cursor.stream not in ("", found["stream"]):
                yield RESTART
            self._cursor = Cursor(found["stream"], found["next"])
            yield tokens_event(self._cursor, found["rows"])
