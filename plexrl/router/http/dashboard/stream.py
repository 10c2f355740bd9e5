"""Server-sent events of the overview: a bounded rate, a bounded number of streams."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from fastapi import Request

from plexrl.errors import AuthenticationError, OverloadedError, PlexRLError
from plexrl.router.http.streams.events import named_event
from plexrl.router.services.authentication import Caller
from plexrl.router.services.error_responses import public_error
from plexrl.router.services.services import RouterServices

PERIOD_S = 2.0
STREAMS_MAX = 200
"""Of operators; and of all tenants together."""
OF_TENANT_MAX = 20
"""Of one tenant, so that it keeps no other out."""


class OverviewStreams:
    """The streams of one router that are open."""

    def __init__(self, period_s: float = PERIOD_S, most: int = STREAMS_MAX) -> None:
        self._period_s, self._most = period_s, most
        self._open: Counter[str | None] = Counter()
        """By tenant; None: of operators."""

    def open(
        self, request: Request, services: RouterServices, caller: Caller
    ) -> AsyncIterator[bytes]:
        """The events for one reader. Raises `OverloadedError`: too many streams are open."""
        own = self._open[caller.scope]
        if own >= (self._most if caller.sees_all else OF_TENANT_MAX):
            raise OverloadedError(
                f"{own} pages follow this router already: close some, or read /v1/overview",
                retry_after_s=self._period_s,
            )
        if not caller.sees_all and self._open.total() - self._open[None] >= self._most:
            raise OverloadedError(
                "tenants follow this router with as many pages as it serves: read /v1/overview",
                retry_after_s=self._period_s,
            )
        return self._events(request, services, caller)

    async def _events(
        self, request: Request, services: RouterServices, caller: Caller
    ) -> AsyncIterator[bytes]:
        reader = caller.scope
        self._open[reader] += 1
        try:
            while not services.shutdown.has_begun:
                try:
                    caller = await _still_known(request, services)
                    yield named_event("overview", await services.overviews.overview(caller))
                except AuthenticationError as error:
                    yield named_event("error", error.to_wire())
                    return
                except PlexRLError as error:
                    shown = error if caller.sees_all else public_error(error)
                    yield named_event("error", shown.to_wire())
                await self._wait(services)
        finally:
            self._open[reader] -= 1
            if not self._open[reader]:
                del self._open[reader]

    async def _wait(self, services: RouterServices) -> None:
        """Wait for the next event, or for the end of this router."""
        try:
            async with asyncio.timeout(self._period_s) as wait:
                with services.shutdown.interrupting(wait):
                    await asyncio.Event().wait()
        except TimeoutError:
            return


async def _still_known(request: Request, services: RouterServices) -> Caller:
    """The caller of the stream, by its key of now: a stream must not outlive its key."""
    address = request.client.host if request.client else ""
    return await services.keys.caller_of(services.keys.authorization_of(request), address)
