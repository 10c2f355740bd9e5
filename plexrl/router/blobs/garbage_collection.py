"""Deletes results that are old and payloads that no operation references.

Results are deleted by age. A payload is normally deleted by the scheduler's order. But a submission
may end without a reply (its router was killed, or the scheduler restarted), and the client's retry
then brings a payload of its own. A killed router also loses the orders to delete payloads. So the
router queries the scheduler about payloads old enough that their submission ended long ago.
"""

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Protocol

from plexrl.errors import PlexRLError
from plexrl.router.blobs.store import BlobStore
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.cluster_views import NeedlessPayloadsView

LOG = logging.getLogger(__name__)

RESULT_KEPT_S = 3600.0
"""How long a result is kept."""
ORPHAN_AGE_S = 3600.0
"""Far longer than any submission takes."""
ORPHAN_PERIOD_S = 600.0
QUERY_MAX = 5000
"""Payloads in one query to the scheduler."""


class Scheduler(Protocol):
    """The part of `SchedulerLink` that this module uses."""

    async def call(
        self, method: m.Method[NeedlessPayloadsView], params: Mapping[str, object]
    ) -> NeedlessPayloadsView:
        """Call the scheduler. Raises `PlexRLError`."""
        ...


async def collect_results(blobs: BlobStore) -> None:
    """Delete old results, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(blobs.discard_results, older_than_s=RESULT_KEPT_S)
        except (PlexRLError, OSError) as error:
            LOG.error("old results were not deleted: %s", error)
        # Several routers delete from one store: not all of them at once.
        await asyncio.sleep(blobs.result_period_s * random.uniform(0.75, 1.25))


async def collect_orphans(
    blobs: BlobStore,
    scheduler: Scheduler,
    *,
    older_than_s: float = ORPHAN_AGE_S,
    every_s: float = ORPHAN_PERIOD_S,
) -> None:
    """Delete payloads that no operation references, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        try:
            found = await asyncio.to_thread(blobs.payloads, older_than_s=older_than_s)
            for start in range(0, len(found), QUERY_MAX):
                query = {"blobs": found[start : start + QUERY_MAX]}
                orphans = (await scheduler.call(m.NEEDLESS_PAYLOADS, query))["blobs"]
                if orphans:
                    LOG.info("deleting %d payloads that no operation references", len(orphans))
                    blobs.discard_all(orphans)
        except (PlexRLError, OSError) as error:
            LOG.info("payloads that no operation references stay for now: %s", error)
