"""The end of a router: whoever still waits for an answer is asked to come again.

Long polls end at once with what is known by then. A request that is cut off when its time is over
is answered 503 with `Retry-After`; the server would else answer 500, which says that something is
wrong with the request.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from plexrl.errors import UnavailableError
from plexrl.router.http.error_responses import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_S = 0.5


class Stopping:
    """Whether this router is about to end, and the waits that this cuts short."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """End all waits."""
        self.has_begun = True
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def cutting_short(self, wait: asyncio.Timeout) -> Iterator[None]:
        """Have `wait`, which was entered, time out as soon as the router stops."""
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)


class AskedAgain:
    """Middleware: a request that the server cuts off is answered before it ends."""

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_answered = False

        async def noting(message: "Message") -> None:
            nonlocal is_answered
            is_answered = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except asyncio.CancelledError:
            if not is_answered:
                await error_response(cut_off())(scope, receive, send)
            raise


def cut_off() -> UnavailableError:
    """What a request is told that was not answered before the router's end."""
    return UnavailableError(
        "this router is stopping: send the same request again", retry_after_s=RETRY_AFTER_S
    )
