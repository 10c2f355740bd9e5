"""Shutdown of a router: clients that wait for a response are asked to send the request again.

Long polls end at once with the current state. A request that is cut off at the end of the drain
time is answered 503 with `Retry-After`. Without this the server would answer 500, which means that
the request itself is wrong.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from plexrl.errors import UnavailableError
from plexrl.router.services.error_responses import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_S = 0.5


class Shutdown:
    """Whether this router is shutting down, and the waits that end early because of it."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """End all waits."""
        self.has_begun = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def interrupting(self, wait: asyncio.Timeout) -> Iterator[None]:
        """Make `wait`, which was entered, time out as soon as the shutdown begins."""
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)


class RetryOnShutdown:
    """ASGI middleware that answers 503 to a request that the server cuts off."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_responded = False

        async def recording_send(message: "Message") -> None:
            nonlocal has_responded
            has_responded = True
            await send(message)

        try:
            await self._app(scope, receive, recording_send)
        except asyncio.CancelledError:
            if not has_responded:
                stopping = UnavailableError(
                    "this router is stopping: send the same request again",
                    retry_after_s=RETRY_AFTER_S,
                )
                await error_response(stopping)(scope, receive, send)
            raise
