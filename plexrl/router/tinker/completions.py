"""Samples of a sampler that have ended: one poll for all of them, in place of one for each.

The cursor of such a poll is an index in the scheduler's operation log. So the router keeps nothing
between polls, and a restarted one goes on where the former one was.

The answer to a poll has no room for the reason why a sample waits. So a poll in which nothing ends
names the oldest sample that waits: its client then polls that one alone, and is told the reason.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from plexrl.router.services.error_responses import RETRIABLE
from plexrl.router.tinker.api import ClusterApi
from plexrl.router.tinker.records import FutureRecord, RecordFile, SamplerRecord
from plexrl.wire.messages.views import LoggedOperationView, Operations

HOLD_S = 30.0
"""How long a poll is held. The SDK gives it up after 45 s."""
PAUSES_S = (0.02, 1.0)
"""Shortest and longest pause between two looks at the log."""
PAGE = 1000
CLONE = 1_000_000_000
"""Requests of a clone of a sampler have numbers from this one on, times the clone's number."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample whose result is to be fetched."""

    request: str
    is_failed: bool = False
    nbytes: int | None = None
    """Size of the result; None: unknown."""


class Completions:
    """Answers polls of whole samplers."""

    def __init__(self, api: ClusterApi, records: RecordFile) -> None:
        self._api = api
        self._records = records

    async def poll(
        self, key: str, sampler: SamplerRecord, clone: int, cursor: int, hold_s: float = HOLD_S
    ) -> tuple[list[Completion], int]:
        """Samples of a sampler's clone that have ended after `cursor`, and the next cursor.

        Waits for at least one, `hold_s` seconds at most.
        """
        deadline = time.monotonic() + hold_s
        pause_s = PAUSES_S[0]
        while True:
            try:
                rows = await self._rows(key, sampler, cursor)
            except RETRIABLE:
                rows = []
            cursor = rows[-1]["index"] if rows else cursor
            if ended := [_completion(row) for row in rows if _is_of(row, sampler, clone)]:
                return ended, cursor
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            if len(rows) < PAGE:
                await asyncio.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, PAUSES_S[1])
        return [] if hold_s == 0 else self._oldest(sampler, clone), cursor

    def drop(self, sampler: SamplerRecord, requests: Iterable[str]) -> None:
        """Forget samples whose results the client has."""
        for request in requests:
            if request.rpartition(":")[0] == sampler.id:
                future = self._records.find(FutureRecord, request)
                if future is not None:
                    self._records.drop(future)

    async def _rows(
        self, key: str, sampler: SamplerRecord, cursor: int
    ) -> Sequence[LoggedOperationView]:
        query = f"deployment={quote(sampler.deployment, safe='')}&kind=generate"
        page: Operations = await self._api.call(
            key, "GET", f"/v1/operations?{query}&after={cursor}&limit={PAGE}"
        )
        return page["operations"]

    def _oldest(self, sampler: SamplerRecord, clone: int) -> list[Completion]:
        for future in self._records.all(FutureRecord, sampler.session):
            if _clone_of(future.id, sampler) == clone:
                return [Completion(future.id)]
        return []


def _completion(row: LoggedOperationView) -> Completion:
    is_failed = row["error"] is not None
    return Completion(row["operation"], is_failed, None if is_failed else row["result_bytes"])


def _is_of(row: LoggedOperationView, sampler: SamplerRecord, clone: int) -> bool:
    return _clone_of(row["operation"], sampler) == clone


def _clone_of(request: str, sampler: SamplerRecord) -> int | None:
    """The clone of the sampler that has sent a request; None: another sampler has."""
    owner, _, number = request.rpartition(":")
    return int(number) // CLONE if owner == sampler.id and number.isdecimal() else None
