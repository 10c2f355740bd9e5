"""Deletes small files of jobs: captured calls by age, everything else with its job.

The scheduler remembers ended jobs up to a bound. What is kept of a job is deleted some time after
the scheduler has forgotten it, also what a job of the same id and tenant has not written since.
"""

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import unquote

from plexrl.errors import NotFoundError, PlexRLError, StorageError
from plexrl.router.job_files.captures import Captures
from plexrl.router.job_files.record_store import RecordStore
from plexrl.wire.messages.cluster_views import CheckpointOwnerView
from plexrl.wire.scheduler_methods import CHECKPOINT_OWNER, Method

LOG = logging.getLogger(__name__)

CAPTURES_KEPT_S = 3600.0
"""How long a trajectory is kept after its last call."""
RECORDS_KEPT_S = 86_400.0
"""Least age of a forgotten job's newest file. A new job of its id may just have begun; and a
scheduler that is started with a wrong journal by mistake costs no files within a day."""
PERIOD_S = 600.0
"""Time between two deletions."""
SUBJECTS = ("samples", "health", "metrics")
"""What is kept as long as the scheduler remembers the job."""
EARLIER = frozenset({"rows", "pages"})
"""What an object store has directly below a job's id, if the job has not been used since an earlier
version (`MetricsObjects`)."""


class JobOwners(Protocol):
    """The part of `SchedulerLink` that this module uses."""

    async def call(
        self, method: Method[CheckpointOwnerView], params: Mapping[str, object]
    ) -> CheckpointOwnerView:
        """Call the scheduler. Raises `PlexRLError`."""
        ...


async def collect_job_files(captures: Captures, records: RecordStore, scheduler: JobOwners) -> None:
    """Delete what is old, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(captures.discard, older_than_s=CAPTURES_KEPT_S)
            await discard_forgotten(records, scheduler, older_than_s=RECORDS_KEPT_S)
        except (PlexRLError, OSError) as error:
            LOG.error("old files of jobs were not deleted: %s", error)
        await asyncio.sleep(PERIOD_S * random.uniform(0.75, 1.25))


async def discard_forgotten(
    records: RecordStore, scheduler: JobOwners, *, older_than_s: float
) -> None:
    """Delete the files of jobs that the scheduler does not know, if all of a job's are older.
    Raises as `RecordStore` and `SchedulerLink.call`."""
    for subject in SUBJECTS:
        for tenant in await asyncio.to_thread(records.folders, subject):
            # Jobs are listed first: one that is submitted now is in no list.
            jobs = await asyncio.to_thread(records.folders, f"{subject}/{tenant}")
            known = await _known_jobs(scheduler, unquote(tenant))
            if subject == "metrics" and EARLIER & set(jobs) and await _is_job(scheduler, tenant):
                known |= EARLIER
            for job in jobs:
                if unquote(job) not in known:
                    folder = f"{subject}/{tenant}/{job}"
                    try:
                        await asyncio.to_thread(_discard, records, folder, older_than_s)
                    except (OSError, StorageError) as error:
                        # The next jobs are not kept for one that cannot be deleted.
                        LOG.error("%s was not deleted: %s", folder, error)


async def _is_job(scheduler: JobOwners, name: str) -> bool:
    try:
        await scheduler.call(CHECKPOINT_OWNER, {"job": unquote(name)})
    except NotFoundError:
        return False
    return True


async def _known_jobs(scheduler: JobOwners, tenant: str) -> set[str]:
    try:
        return set((await scheduler.call(CHECKPOINT_OWNER, {"tenant": tenant}))["jobs"])
    except NotFoundError:
        return set()


def _discard(records: RecordStore, folder: str, older_than_s: float) -> None:
    if records.remove(folder, before=records.clock() - older_than_s):
        LOG.info("deleted %s: the scheduler has forgotten its job", folder)
