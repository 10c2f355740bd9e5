"""Authentication and request-body limits, applied to every request before a route runs.

The key is checked from the headers, before a byte of the body is read. A request body is limited in
size and in time. Routes that take large payloads stream them to disk and set their own limits.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plexrl.errors import ConnectionLostError, PayloadTooLargeError, PlexRLError
from plexrl.router.server.guarded_protocol import STATE_KEY, GuardedProtocol

BODY_KEY = "incoming_body"
"""Key of a request's `LimitedBody` in `scope["state"]`."""

_DIGITS = re.compile(r"[0-9]{1,18}")


class BodyRefusedError(HTTPException):
    """Carries `cause` through FastAPI, which passes on no other error raised while it reads a
    body."""

    def __init__(self, cause: PlexRLError) -> None:
        super().__init__(cause.status)
        self.cause = cause


class LimitedBody:
    """The body of a request that is being received, limited in size and time."""

    def __init__(self, scope: Scope, receive: Receive, bytes_max: int, timeout_s: float) -> None:
        self._receive = receive
        self._bytes_max = bytes_max
        self.timeout_s = timeout_s
        self.content_length = _content_length(scope)
        """Size that the request declares, in bytes; absent: it declares none."""
        self._bytes = 0
        self._deadline_at: float | None = None
        self._is_streamed = self._is_whole = False

    def allow(self, bytes_max: int) -> None:
        """Accept a larger body. The route streams it and sets its own time limit."""
        self._bytes_max = bytes_max
        self._is_streamed = True

    async def receive(self) -> Message:
        """Return the next part of the body.

        Raises:
            BodyRefusedError: the body is too large or too slow.
        """
        if self._is_whole:
            # The only message left is the disconnect, which has no deadline.
            return await self._receive()
        if self._deadline_at is None:
            self._check_size(self.content_length or 0)
            self._deadline_at = asyncio.get_running_loop().time() + self.timeout_s
        try:
            async with asyncio.timeout_at(None if self._is_streamed else self._deadline_at):
                message = await self._receive()
        except TimeoutError as error:
            raise BodyRefusedError(
                ConnectionLostError(
                    f"the request's body did not arrive within {self.timeout_s:g} s: send it again"
                )
            ) from error
        self._bytes += len(message.get("body", b""))
        self._check_size(self._bytes)
        self._is_whole = not message.get("more_body", False)
        return message

    async def chunks(self) -> AsyncIterator[bytes]:
        """The parts of the body that have not been received yet; none after its end.

        Raises:
            BodyRefusedError: as `receive`.
            ConnectionLostError: the client disconnected before the end of the body.
        """
        while not self._is_whole:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ConnectionLostError("the client disconnected before the end of its request")
            yield message.get("body", b"")

    def _check_size(self, size: int) -> None:
        if size > self._bytes_max:
            raise BodyRefusedError(
                PayloadTooLargeError(
                    f"the body is over {self._bytes_max} bytes: send less, or split the batch",
                    body_bytes_max=self._bytes_max,
                )
            )


class RequestLimits:
    """ASGI middleware that authenticates each request and limits its body."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Callable[[Request], Awaitable[object]],
        needs_key: Callable[[str], bool] = lambda _: True,
        error_response: Callable[[Request, Exception], Awaitable[JSONResponse]],
        bytes_max: int,
        timeout_s: float,
    ) -> None:
        """`authenticate` raises if a request carries no valid key; `needs_key` tells by the path
        whether it needs one; `error_response` renders an error."""
        self._app = app
        self._authenticate = authenticate
        self._needs_key = needs_key
        self._error_response = error_response
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        if self._needs_key(scope["path"]):
            request = Request(scope)
            try:
                await self._authenticate(request)
            except PlexRLError as error:
                response = close_after(await self._error_response(request, error))
                await response(scope, receive, send)
                return
            connection = state.get(STATE_KEY)
            if isinstance(connection, GuardedProtocol):
                connection.authenticated()
        body = LimitedBody(scope, receive, self._bytes_max, self._timeout_s)
        state[BODY_KEY] = body
        try:
            await self._app(scope, body.receive, send)
        finally:
            # Body and request refer to each other. Breaking the cycle here spares the collector.
            del state[BODY_KEY]


def close_after(response: JSONResponse) -> JSONResponse:
    """Make the connection close after this response: the rest of the request is not read."""
    response.headers["connection"] = "close"
    return response


def _content_length(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            text = value.decode("latin-1").strip()
            return int(text) if _DIGITS.fullmatch(text) else None
    return None
