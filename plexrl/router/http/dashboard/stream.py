"""Server-sent events of the overview: a bounded rate, a bounded number of streams."""

import asyncio
import json
from collections.abc import AsyncIterator

from fastapi import Request

from plexrl.errors import AuthenticationError, OverloadedError, PlexRLError
from plexrl.router.services.authentication import Caller
from plexrl.router.services.error_responses import public_error
from plexrl.router.services.services import RouterServices

PERIOD_S = 2.0
STREAMS_MAX = 200


class OverviewStreams:
    """The streams of one router that are open."""

    def __init__(self, period_s: float = PERIOD_S, most: int = STREAMS_MAX) -> None:
        self._period_s, self._most = period_s, most
        self._open = 0

    def open(
        self, request: Request, services: RouterServices, caller: Caller
    ) -> AsyncIterator[bytes]:
        """The events for one reader. Raises `OverloadedError`: too many streams are open."""
        if self._open >= self._most:
            raise OverloadedError(
                f"{self._most} pages follow this router already: close some, or read /v1/overview",
                retry_after_s=self._period_s,
            )
        return self._events(request, services, caller)

    async def _events(
        self, request: Request, services: RouterServices, caller: Caller
    ) -> AsyncIterator[bytes]:
        self._open += 1
        try:
            while not services.shutdown.has_begun:
                try:
                    caller = await _still_known(request, services)
                    yield event("overview", await services.overviews.overview(caller))
                except AuthenticationError as error:
                    yield event("error", error.to_wire())
                    return
                except PlexRLError as error:
                    shown = error if caller.is_operator else public_error(error)
                    yield event("error", shown.to_wire())
                await self._wait(services)
        finally:
            self._open -= 1

    async def _wait(self, services: RouterServices) -> None:
        """Wait for the next event, or for the end of this router."""
        try:
            async with asyncio.timeout(self._period_s) as wait:
                with services.shutdown.interrupting(wait):
                    await asyncio.Event().wait()
        except TimeoutError:
            return


async def _still_known(request: Request, services: RouterServices) -> Caller:
    """Who reads: a stream must not outlive its key."""
    address = request.client.host if request.client else ""
    return await services.keys.caller_of(request.headers.get("authorization", ""), address)


def event(name: str, content: object) -> bytes:
    """One server-sent event with JSON."""
    return f"event: {name}\ndata: {json.dumps(content)}\n\n".encode()
