"""The route that streams a generation's tokens."""

from collections.abc import AsyncIterator, Callable
from typing import Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import StreamingResponse

from plexrl.errors import AuthenticationError
from plexrl.router.http.streams.events import (
    StreamEvent,
    error_event,
    json_line,
    read_cursor,
    server_sent,
)
from plexrl.router.http.streams.token_reader import TokenReader
from plexrl.router.services.access_table import CHANGE
from plexrl.router.services.guarded_route import GuardedRoute, check_access
from plexrl.router.services.services import RouterServices, Services

SERVER_SENT = "text/event-stream"
JSON_LINES = "application/x-ndjson"
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Without the second one nginx buffers events."""

ROUTES = APIRouter(prefix="/v1", tags=["operations"], route_class=GuardedRoute)


@ROUTES.get(
    "/operations/{operation:path}/stream",
    summary="Tokens of a streamed generation, as server-sent events or JSON lines",
    response_class=StreamingResponse,
)
async def stream(
    request: Request,
    services: Services,
    operation: str,
    after: str = "",
    on_disconnect: Literal["continue", "cancel"] = "continue",
    last_event_id: str = Header(""),
) -> StreamingResponse:
    """Server-sent events if `Accept` contains text/event-stream, else JSON lines.

    Every event with tokens has a cursor (the event's id). Send the cursor as `after` or as
    Last-Event-ID to continue the stream after it, on any router, for as long as the result is kept.
    The generation continues without readers, unless `on_disconnect=cancel`, which is for those
    who may cancel it.
    """
    caller = await services.caller(request)
    if on_disconnect == "cancel":
        check_access(CHANGE, caller, request)
        # For the audit log.
        request.state.rule = CHANGE
    reader = TokenReader(services, caller, operation, read_cursor(after or last_event_id))
    await reader.check()
    is_server_sent = SERVER_SENT in request.headers.get("accept", "")
    body = _encoded(services, request, reader, server_sent if is_server_sent else json_line)
    if on_disconnect == "cancel":
        body = services.disconnects.guard(body, caller, operation)
    return StreamingResponse(
        body,
        media_type=SERVER_SENT if is_server_sent else JSON_LINES,
        headers=STREAM_HEADERS,
    )


async def _encoded(
    services: RouterServices,
    request: Request,
    reader: TokenReader,
    encode: Callable[[StreamEvent], bytes],
) -> AsyncIterator[bytes]:
    """The encoded events, until the client disconnects, its key is revoked or expires, or this
    router stops."""
    async for event in reader.events():
        try:
            await services.check_still_valid(request)
        except AuthenticationError as error:
            yield encode(error_event(error.to_wire()))
            return
        if "waiting" in event and await request.is_disconnected():
            return
        yield encode(event)
        if services.shutdown.has_begun:
            # Without a last event, so that the reader continues on another router.
            return
