"""What nobody fetches or needs any more leaves the blob store.

Results go by their age. A payload is the scheduler's to give up; but one whose submission ended
without an answer (its router was killed, or the scheduler restarted) may belong to no operation,
and the client's next try has brought its own. A router that is killed takes orders to give payloads
up with it, too. So the scheduler is asked about those that are old enough to have been accepted or
refused long ago.
"""

import asyncio
import logging
from typing import Any, Protocol

from plexrl.errors import PlexRLError
from plexrl.ids import BlobRef
from plexrl.router.blobs.store import BlobStore

LOG = logging.getLogger(__name__)

RESULT_KEPT_S = 3600.0
"""How long a result can be fetched."""
ORPHAN_AGE_S = 3600.0
"""Far longer than a submission is under way."""
SWEEP_S = 60.0
ORPHANS_S = 600.0
ASKED_MAX = 5000
"""Payloads that the scheduler is asked about at a time."""


class Scheduler(Protocol):
    """Whoever knows the operations."""

    async def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """An answer. Raises `PlexRLError`."""
        ...


async def discard_old_results(blobs: BlobStore) -> None:
    """Do so for ever."""
    while True:
        try:
            await asyncio.to_thread(blobs.discard_results, older_than_s=RESULT_KEPT_S)
        except OSError as error:
            LOG.error("the blob store cannot be swept: %s", error)
        await asyncio.sleep(SWEEP_S)


async def discard_orphans(
    blobs: BlobStore,
    scheduler: Scheduler,
    *,
    older_than_s: float = ORPHAN_AGE_S,
    every_s: float = ORPHANS_S,
) -> None:
    """Do so for ever."""
    while True:
        await asyncio.sleep(every_s)
        try:
            found = await asyncio.to_thread(blobs.payloads, older_than_s=older_than_s)
            for start in range(0, len(found), ASKED_MAX):
                asked = {"blobs": found[start : start + ASKED_MAX]}
                needless = (await scheduler.call("needless_payloads", asked))["blobs"]
                if needless:
                    LOG.info("%d payloads that no operation needs", len(needless))
                    blobs.discard_all(BlobRef(ref) for ref in needless)
        except (PlexRLError, OSError) as error:
            LOG.info("payloads that no operation needs stay for now: %s", error)
