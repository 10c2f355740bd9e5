"""The route that streams a generation's tokens."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse

from plexrl.errors import PlexRLError
from plexrl.router.http.authentication import Caller
from plexrl.router.http.gateway import Gateway, Plain
from plexrl.router.streams.events import json_line, read_cursor, server_sent
from plexrl.router.streams.token_reader import TokenReader

SERVER_SENT = "text/event-stream"
JSON_LINES = "application/x-ndjson"
RETURN_S = 5.0
"""How long a generation that goes with its last reader waits for one to come back."""


def stream_routes(gateway: Gateway) -> APIRouter:
    """Streams of tokens."""
    routes = APIRouter(prefix="/v1", tags=["operations"])
    readers = Readers(gateway)

    @routes.get(
        "/operations/{operation:path}/stream",
        summary="Tokens of a streamed generation, as server-sent events or JSON lines",
        description="Server-sent events where `Accept` says text/event-stream, else JSON lines. "
        "Every event of tokens has a cursor (the event's id): give it as `after`, or as "
        "Last-Event-ID, and the stream goes on behind it, on any router, for as long as the result "
        "is kept. The generation goes on without readers, unless `on_disconnect=cancel`.",
        response_class=StreamingResponse,
    )
    async def stream(
        request: Request,
        operation: str,
        after: str = "",
        on_disconnect: Literal["continue", "cancel"] = "continue",
        last_event_id: str = Header(""),
    ) -> StreamingResponse:
        caller = await gateway.caller(request)
        reader = TokenReader(gateway, caller, operation, read_cursor(after or last_event_id))
        await reader.begin()
        is_server_sent = SERVER_SENT in request.headers.get("accept", "")
        encode = server_sent if is_server_sent else json_line
        body = readers.serve(request, reader, encode)
        if on_disconnect == "cancel":
            body = readers.with_cancel(body, caller, operation)
        return StreamingResponse(
            body,
            media_type=SERVER_SENT if is_server_sent else JSON_LINES,
            # Proxies (nginx) would hold events back to send more at once.
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    return routes


class Readers:
    """Those of one router, and the cancellations that they leave behind."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._reading: Counter[str] = Counter()
        self._leaving: set[asyncio.Task[None]] = set()

    async def serve(
        self, request: Request, reader: TokenReader, encode: Callable[[Plain], bytes]
    ) -> AsyncIterator[bytes]:
        """The encoded events, as long as the client is there."""
        async for event in reader.events():
            if "waiting" in event and await request.is_disconnected():
                return
            yield encode(event)
            if self._gateway.stopping.has_begun:
                # Without a last event: its reader takes it up again with another router.
                return

    async def with_cancel(
        self, body: AsyncIterator[bytes], caller: Caller, operation: str
    ) -> AsyncIterator[bytes]:
        """`body`; a little after it was left, the operation is cancelled."""
        self._reading[operation] += 1
        try:
            async for chunk in body:
                yield chunk
        finally:
            # Also where the body came to its end: cancelling what is final changes nothing.
            self._reading[operation] -= 1
            task = asyncio.create_task(self._cancel_later(caller, operation))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _cancel_later(self, caller: Caller, operation: str) -> None:
        await asyncio.sleep(RETURN_S)
        if self._reading[operation]:
            return
        del self._reading[operation]
        try:
            fields = {"operation": operation, **caller.claim}
            await self._gateway.scheduler.call("cancel_operation", fields)
        except PlexRLError:
            # It is forgotten already, or the scheduler is away: then it ends by itself.
            return
