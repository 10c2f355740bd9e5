"""What every request passes before a route sees it: its key, and bounds on its body.

The key is checked from the headers, before a byte of the body is read. A body has a bound in size
and one in time. Routes that take large payloads stream them to disk and have bounds of their own.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plexrl.errors import ConnectionLostError, PayloadTooLargeError, PlexRLError
from plexrl.router.http.server.guarded_protocol import STATE_KEY, GuardedProtocol

OPEN_PATHS = frozenset(
    {
        *("/v1/health", "/v1/metrics"),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
    }
)
"""Requests that carry no key."""
BODY_KEY = "incoming_body"
"""Of a request's body in its `scope["state"]`."""

_DIGITS = re.compile(r"[0-9]{1,18}")


class BodyRefusedError(HTTPException):
    """`cause` on its way through FastAPI, which passes on no other errors of reading a body."""

    def __init__(self, cause: PlexRLError) -> None:
        super().__init__(cause.status)
        self.cause = cause


class IncomingBody:
    """A request's body on its way in, bounded in size and time."""

    def __init__(self, scope: Scope, receive: Receive, bytes_max: int, timeout_s: float) -> None:
        self._receive = receive
        self._bytes_max = bytes_max
        self.timeout_s = timeout_s
        self._announced = _announced(scope)
        self._bytes = 0
        self._deadline_at: float | None = None
        self._is_streamed = self._is_whole = False

    def allow(self, bytes_max: int) -> None:
        """Take a larger body: the route streams it, and bounds its time by its size."""
        self._bytes_max = bytes_max
        self._is_streamed = True

    async def receive(self) -> Message:
        """The next part.

        Raises:
            BodyRefusedError: the body is too large, or too slow.
        """
        if self._is_whole:
            # Only the connection's end can come now, whenever that is.
            return await self._receive()
        if self._deadline_at is None:
            self._check_size(self._announced)
            self._deadline_at = asyncio.get_running_loop().time() + self.timeout_s
        try:
            async with asyncio.timeout_at(None if self._is_streamed else self._deadline_at):
                message = await self._receive()
        except TimeoutError as error:
            raise BodyRefusedError(
                ConnectionLostError(
                    f"the request's body was not there in {self.timeout_s:g} s: send it again"
                )
            ) from error
        self._bytes += len(message.get("body", b""))
        self._check_size(self._bytes)
        self._is_whole = not message.get("more_body", False)
        return message

    def _check_size(self, size: int) -> None:
        if size > self._bytes_max:
            raise BodyRefusedError(
                PayloadTooLargeError(
                    f"the body is over {self._bytes_max} bytes: send less, or split the batch",
                    body_bytes_max=self._bytes_max,
                )
            )


class Door:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticate: Callable[[Request], Awaitable[object]],
        answer: Callable[[Request, Exception], Awaitable[JSONResponse]],
        bytes_max: int,
        timeout_s: float,
    ) -> None:
        """`authenticate` raises where a request carries no valid key; `answer` shows an error."""
        self._app = app
        self._authenticate = authenticate
        self._answer = answer
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        if scope["path"] not in OPEN_PATHS:
            request = Request(scope)
            try:
                await self._authenticate(request)
            except PlexRLError as error:
                response = closing(await self._answer(request, error))
                await response(scope, receive, send)
                return
            connection = state.get(STATE_KEY)
            if isinstance(connection, GuardedProtocol):
                connection.authenticated()
        body = IncomingBody(scope, receive, self._bytes_max, self._timeout_s)
        state[BODY_KEY] = body
        try:
            await self._app(scope, body.receive, send)
        finally:
            # It refers to the request, and the request to it: a collection for each is dear.
            del state[BODY_KEY]


def closing(response: JSONResponse) -> JSONResponse:
    """The response, after which the connection ends: nobody reads what is left of the request."""
    response.headers["connection"] = "close"
    return response


def _announced(scope: Scope) -> int:
    """What the request says of its body's length; 0 where it does not."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            text = value.decode("latin-1").strip()
            return int(text) if _DIGITS.fullmatch(text) else 0
    return 0
