"""Cancels a generation a little after the last reader of its token stream has disconnected."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

from plexrl.errors import PlexRLError
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.services.authentication import Caller
from plexrl.wire import scheduler_methods as m

RECONNECT_S = 5.0
"""How long the generation waits for a reader to come back."""


class CancelOnDisconnect:
    """Counts the readers of each operation and cancels operations that have none left."""

    def __init__(self, scheduler: SchedulerLink) -> None:
        self._scheduler = scheduler
        self._readers: Counter[str] = Counter()
        self._cancelling: set[asyncio.Task[None]] = set()

    async def guard(
        self, body: AsyncIterator[bytes], caller: Caller, operation: str
    ) -> AsyncIterator[bytes]:
        """Pass `body` on; schedule the cancellation of `operation` when the reader leaves."""
        self._readers[operation] += 1
        try:
            async for chunk in body:
                yield chunk
        finally:
            # Also after the last chunk: cancelling a final operation changes nothing.
            self._readers[operation] -= 1
            task = asyncio.create_task(self._cancel_later(caller, operation))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    async def _cancel_later(self, caller: Caller, operation: str) -> None:
        await asyncio.sleep(RECONNECT_S)
        if self._readers[operation]:
            return
        del self._readers[operation]
        try:
            fields = {"operation": operation, **caller.claim}
            await self._scheduler.call(m.CANCEL_OPERATION, fields)
        except PlexRLError:
            # The operation is evicted already, or the scheduler is unreachable. In the second case
            # the generation ends by itself.
            return
