"""How a controller leaves a job that has not ended: it detaches it, or forgets to end it."""

import asyncio
import logging
import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from plexrl.client.heartbeats import beat
from plexrl.client.place import Place
from plexrl.errors import ControllerReplacedError, JobEndedError, PlexRLError

if TYPE_CHECKING:
    from plexrl.client.job import Job
    from plexrl.client.transport import Transport

LOG = logging.getLogger(__name__)

LAST_WORD_S = 2.0
"""Longest wait at the end of a script for the last word about its job."""
AGAIN_S = 2.0
"""At a terminal a second Ctrl-C within this time cancels the job."""


def leave_block(job: "Job", error: BaseException | None) -> None:
    """End a job with its `with` block; Ctrl-C detaches it."""
    if job.has_left:
        return
    if error is None:
        try:
            job.finish()
        except KeyboardInterrupt:
            leave_interrupted(job)
            raise
        return
    if is_interrupt(error):
        leave_interrupted(job)
        return
    try:
        job.finish("failed", f"{type(error).__name__}: {error}".removesuffix(": "))
    except PlexRLError as second:
        # The block's own error is the one to show.
        LOG.warning("the job could not be ended: %s", second)


def is_interrupt(error: BaseException) -> bool:
    """Whether it stands for a Ctrl-C: for an `async` controller that is a cancellation, like one by
    a timeout, and `asyncio.run` knows which it was."""
    if isinstance(error, KeyboardInterrupt):
        return True
    if not isinstance(error, asyncio.CancelledError):
        return False
    # The runner's own handler is a `functools.partial` of its method.
    runner = getattr(getattr(signal.getsignal(signal.SIGINT), "func", None), "__self__", None)
    return isinstance(runner, asyncio.Runner) and bool(getattr(runner, "_interrupt_count", 0))


def leave_interrupted(job: "Job") -> None:
    """Detach a job after a Ctrl-C, unless the controller has left it; a second one cancels it."""
    try:
        if _detach(job):
            time.sleep(AGAIN_S)
    except KeyboardInterrupt:
        _cancel(job)


async def leave_interrupted_async(job: "Job") -> None:
    """As `leave_interrupted`, on an event loop."""
    try:
        if _detach(job):
            await asyncio.sleep(AGAIN_S)
    except asyncio.CancelledError:
        await asyncio.to_thread(_cancel, job)
        raise


def warn_if_unfinished(job: "Job", transport: "Transport") -> None:
    """At the end of a script: say that it has not ended its job, and what failed in it unread."""
    controller = transport.controller
    if job.has_left or controller is None or not _lives(job.job, transport):
        return
    if controller.failure is not None:
        LOG.error("job %s: %s", job.job, controller.failure["message"])
    LOG.warning(
        "this script did not end its job %s, so the cluster takes it for detached and cancels it "
        "later: use `with`, `finish()` or `cancel()`\n  resume it: %s\n  cancel it: %s",
        *(job.job, transport.place.attach(job.job), transport.place.cancel(job.job)),
    )


def warn_of_former(jobs: list[dict[str, Any]], place: Place, *, all_are_former: bool) -> None:
    """Say which unfinished jobs have GPUs and no controller: those of former scripts."""
    for each in jobs:
        has_gpus = any(deployment["group"] for deployment in each["deployments"])
        if each["ended_at"] is not None or not has_gpus:
            continue
        if all_are_former or not each["attached"]:
            LOG.warning(
                "job %s of a former script has not ended and holds GPUs.\n  resume it: %s\n"
                "  cancel it: plexrl cancel %s --data-dir %s",
                *(each["job"], place.attach(each["job"]), shlex.quote(each["job"])),
                shlex.quote(str(place.data_dir)),
            )


def _detach(job: "Job") -> bool:
    """Whether to wait for a second Ctrl-C."""
    if job.has_left:
        return False
    job.detach()
    place = job.place
    waits = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    LOG.warning(
        "job %s is detached: what was submitted goes on%s. Without a controller the job is "
        "cancelled after its reattach timeout.\n  resume it: %s\n  cancel it: %s%s",
        job.job,
        ", also in a later cluster of this data directory" if place.is_embedded else "",
        place.attach(job.job),
        place.cancel(job.job),
        f"\n  or press Ctrl-C again within {AGAIN_S:g} s to cancel it" if waits else "",
    )
    return waits


def _cancel(job: "Job") -> None:
    try:
        job.cancel("KeyboardInterrupt")
        LOG.warning("job %s is cancelled", job.job)
    except PlexRLError as error:
        LOG.warning("job %s could not be cancelled: %s", job.job, error)


def _lives(job: str, transport: "Transport") -> bool:
    """Whether the job goes on, as far as the cluster says so at once; its failure is heard of."""
    if transport.is_closed:
        return True
    try:
        beat(transport.impatient(), job, LAST_WORD_S)
    except (JobEndedError, ControllerReplacedError):
        return False
    except PlexRLError as error:
        LOG.warning("%s", error)
    return True
