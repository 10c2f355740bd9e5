"""How a controller leaves a job that has not ended: it detaches it, or forgets to end it."""

import asyncio
import logging
import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from plexrl.client.calls.heartbeats import beat
from plexrl.client.calls.transport import Call, Transport
from plexrl.errors import ControllerReplacedError, JobEndedError, PlexRLError

if TYPE_CHECKING:
    from plexrl.client.blocking.job import Job

LOG = logging.getLogger(__name__)

LAST_WORD_S = 2.0
"""Longest wait at the end of a script for the last word about its job."""
FORMER_MAX = 3
"""Jobs of former scripts that are named."""
AGAIN_S = 2.0
"""At a terminal a second Ctrl-C within this time cancels the job."""


def leave_block(job: "Job", error: BaseException | None) -> None:
    """End a job with its `with` block; Ctrl-C detaches it."""
    if job.left.is_set():
        return
    if is_success(error):
        try:
            job.finish()
        except KeyboardInterrupt:
            leave_interrupted(job)
            raise
        return
    assert error is not None
    if is_interrupt(error):
        leave_interrupted(job)
        return
    try:
        job.finish("failed", f"{type(error).__name__}: {error}".removesuffix(": "))
    except PlexRLError as second:
        # The block's own error is the one to show.
        LOG.warning("the job could not be ended: %s", second)


def is_success(error: BaseException | None) -> bool:
    """Whether a block is left as one that has done its work: at its end, or by `sys.exit()`."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


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
        if await asyncio.to_thread(_detach, job):
            await asyncio.sleep(AGAIN_S)
    except (asyncio.CancelledError, KeyboardInterrupt):
        # The latter where the signal meets this code rather than the event loop.
        await asyncio.to_thread(_cancel, job)
        raise


def tell_detached(transport: Transport, job: str) -> None:
    """Tell the cluster that this controller leaves the job to another one; the cluster would learn
    it from the silence, too. Who only looks at the job has nothing to tell."""
    if transport.controller is not None:
        _tell_detached(transport, job)


def warn_if_unfinished(job: "Job", transport: Transport) -> None:
    """At the end of a script: say that it has not ended its job, and what failed in it unread."""
    controller = transport.controller
    if job.left.is_set() or controller is None or not _lives(job.job, transport):
        return
    if controller.failure is not None:
        LOG.error("job %s: %s", job.job, controller.failure["message"])
    LOG.warning(
        "this script did not end its job %s:\nwithout a controller it is cancelled after its "
        "timeouts; use `with`, `finish()` or `cancel()`\n  resume it: %s\n  cancel it: %s",
        *(job.job, transport.place.attach(job.job), transport.place.cancel(job.job)),
    )


def tell_of_former(transport: Transport, jobs: list[dict[str, Any]], *, is_new: bool) -> None:
    """Say which unfinished jobs have no controller: those of former scripts. Where the cluster
    `is_new`, that is true of all, and it is told so, so that they give their GPUs to others."""
    former = [job for job in jobs if job["ended_at"] is None and (is_new or not job["attached"])]
    for job in former:
        if job["attached"]:
            _tell_detached(transport, job["job"])
    place = transport.place
    for job in former[-FORMER_MAX:]:
        LOG.warning(
            "job %s of a former script has not ended;\nits GPUs go to jobs that wait for some\n"
            "  resume it: %s\n  cancel it: plexrl cancel %s --data-dir %s",
            *(job["job"], place.attach(job["job"]), shlex.quote(job["job"])),
            shlex.quote(str(place.data_dir)),
        )
    if len(former) > FORMER_MAX:
        LOG.warning("and %d more: `plexrl jobs` lists them", len(former) - FORMER_MAX)


def _tell_detached(transport: Transport, job: str) -> None:
    body = {"outcome": "detached", "reason": ""}
    path = f"/v1/jobs/{quote(job)}/finish"
    call = Call(method="POST", path=path, json=body).tried_for(LAST_WORD_S)
    try:
        transport.impatient().request(call)
    except PlexRLError as error:
        LOG.info("the cluster was not told that %s is detached: %s", job, error)


def _detach(job: "Job") -> bool:
    """Whether to wait for a second Ctrl-C."""
    if job.left.is_set() or job.controller is None:
        return False
    place = job.place
    waits = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    LOG.warning(
        "job %s is detached: what was submitted goes on%s.\n"
        "Without a controller it is cancelled after its reattach timeout.\n"
        "  resume it: %s\n  cancel it: %s%s",
        job.job,
        ",\nif need be in the next cluster of the data directory" if place.is_embedded else "",
        place.attach(job.job),
        place.cancel(job.job),
        f"\n  or press Ctrl-C again within {AGAIN_S:g} s to cancel it" if waits else "",
    )
    job.detach()
    return waits


def _cancel(job: "Job") -> None:
    try:
        job.cancel("KeyboardInterrupt")
        LOG.warning("job %s is cancelled", job.job)
    except PlexRLError as error:
        LOG.warning("job %s could not be cancelled: %s", job.job, error)


def _lives(job: str, transport: Transport) -> bool:
    """Whether the job goes on, as far as the cluster says so at once; its failure is heard of."""
    if transport.is_closed:
        return True
    try:
        beat(transport.impatient(), job, within_s=LAST_WORD_S)
    except (JobEndedError, ControllerReplacedError):
        return False
    except PlexRLError as error:
        LOG.warning("%s", error)
    return True
