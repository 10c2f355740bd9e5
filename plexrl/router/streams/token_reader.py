"""The events of one streamed generation, for one reader, on whichever router it asks.

While the generation runs, its worker is asked for what lies behind the reader's place; each
question waits for the reader to have taken the answer to the one before, so nothing piles up for a
slow one.
Once it has finished its result tells the rest.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from plexrl.errors import InvalidRequestError, PlexRLError, StorageError, UnavailableError
from plexrl.ids import BlobRef
from plexrl.router.execution.engines import engine_addresses
from plexrl.router.http.authentication import Caller
from plexrl.router.http.gateway import FINAL, Gateway
from plexrl.router.streams.events import (
    DONE,
    RESTART,
    WAITING,
    Cursor,
    tokens_event,
    told_again,
)
from plexrl.wire.tensors import decode_body

READ_TIMEOUT_S = 2.0
"""After which it is asked whether the operation still runs, and where."""
PAUSE_S = 0.2
"""Between two looks for workers, or a scheduler, that are yet to come."""

Plain = dict[str, Any]


class TokenReader:
    """One reader's way through a stream."""

    def __init__(self, gateway: Gateway, caller: Caller, operation: str, cursor: Cursor) -> None:
        self._gateway = gateway
        self._caller = caller
        self._operation = operation
        self._cursor = cursor
        self._name = uuid.uuid4().hex

    async def begin(self) -> None:
        """Check that there is something to read.

        Raises:
            UnknownOperationError: there is no such operation.
            InvalidRequestError: it is no generation.
        """
        view = await self._view(0.0)
        if view["kind"] != "generate":
            raise InvalidRequestError(
                f"operation {self._operation!r} is of kind {view['kind']}: only generations are "
                "streamed"
            )

    async def events(self) -> AsyncIterator[Plain]:
        """All events behind the cursor; a failure is the last of them."""
        try:
            while True:
                try:
                    view = await self._view(0.0)
                    if view["state"] in FINAL:
                        break
                    async for event in self._read_on(view["deployment"]):
                        yield event
                except (UnavailableError, StorageError):
                    # The generation outlives a restart of the scheduler, and so does its stream.
                    await asyncio.sleep(PAUSE_S)
                yield WAITING
            if view["state"] != "finished":
                yield {"error": view["error"]}
                return
            for event in told_again(self._cursor, *await self._result(view)):
                yield event
            yield DONE
        except PlexRLError as error:
            yield {"error": error.to_wire()}

    async def _view(self, timeout_s: float) -> Plain:
        return await self._gateway.operation(self._caller, self._operation, timeout_s)

    async def _result(self, view: Plain) -> tuple[str, Any]:
        """The stream's name and the arrays of a finished generation."""
        if view["result"] is None:
            return "", {}
        _, arrays = decode_body(await self._gateway.blobs.read(BlobRef(view["result"])))
        return str(json.loads(view["result_json"]).get("stream", "")), arrays

    async def _read_on(self, deployment: str) -> AsyncIterator[Plain]:
        """What the worker tells, until it has nothing to tell for a while."""
        addresses = engine_addresses(await self._gateway.deployment(self._caller, deployment))
        if not addresses:
            await asyncio.sleep(PAUSE_S)
            return
        while True:
            try:
                found = await self._gateway.engines.ask(
                    addresses[0],
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
                    # The worker has told its result; the scheduler is about to know.
                    await self._view(READ_TIMEOUT_S)
                else:
                    # More readers than the worker lets wait: none of them may ask without a pause.
                    await asyncio.sleep(PAUSE_S)
                return
            if self._cursor.stream not in ("", found["stream"]):
                yield RESTART
            self._cursor = Cursor(found["stream"], found["next"])
            yield tokens_event(self._cursor, found["rows"])
