"""How a controller ends its job, detaches from it, or warns that it did neither."""

import asyncio
import logging
import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from plexrl.client.calls.heartbeats import beat
from plexrl.client.calls.transport import Call, Transport
from plexrl.errors import ControllerReplacedError, JobEndedError, PlexRLError
from plexrl.wire.messages.views import JobView

if TYPE_CHECKING:
    from plexrl.client.blocking.job import Job

LOG = logging.getLogger(__name__)

LAST_REQUEST_S = 2.0
"""Longest wait for the last request about a job at the end of a script."""
FORMER_JOBS_MAX = 3
"""Most jobs of former scripts that are listed."""
SECOND_INTERRUPT_S = 2.0
"""Time in which a second Ctrl-C at a terminal cancels the job."""


def end_with_block(job: "Job", error: BaseException | None) -> None:
    """End a job at the end of its `with` block; a Ctrl-C detaches it. A forked child that leaves
    the block does nothing: the job is its parent's."""
    if job.left.is_set() or job._is_inherited:
        return
    if is_success(error):
        try:
            job.finish()
        except KeyboardInterrupt:
            detach_interrupted(job)
            raise
        return
    assert error is not None
    if is_interrupt(error):
        detach_interrupted(job)
        return
    try:
        job.finish("failed", f"{type(error).__name__}: {error}".removesuffix(": "))
    except PlexRLError as second:
        # The block's own error is the one to raise.
        LOG.warning("the job was not ended: %s", second)


def is_success(error: BaseException | None) -> bool:
    """Whether a block was left normally: at its end, or by `sys.exit()`."""
    return error is None or (isinstance(error, SystemExit) and not error.code)


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` means Ctrl-C. In an `async` controller Ctrl-C is a cancellation, like a
    timeout; `asyncio.run` can distinguish them."""
    if isinstance(error, KeyboardInterrupt):
        return True
    if not isinstance(error, asyncio.CancelledError):
        return False
        # The runner's own signal handler is a `functools.partial` of its method.
    runner = getattr(getattr(signal.getsignal(signal.SIGINT), "func", None), "__self__", None)
    return isinstance(runner, asyncio.Runner) and bool(getattr(runner, "_interrupt_count", 0))


def detach_interrupted(job: "Job") -> None:
    """Detach a job after Ctrl-C, unless the controller has left it; a second Ctrl-C cancels it."""
    try:
        if _detach(job):
            time.sleep(SECOND_INTERRUPT_S)
    except KeyboardInterrupt:
        _cancel(job)


async def detach_interrupted_async(job: "Job") -> None:
    """As `detach_interrupted`, on an event loop."""
    try:
        if await asyncio.to_thread(_detach, job):
            await asyncio.sleep(SECOND_INTERRUPT_S)
    except (asyncio.CancelledError, KeyboardInterrupt):
        # KeyboardInterrupt if the signal arrives in this code instead of in the event loop.
        await asyncio.to_thread(_cancel, job)
        raise


def report_detached(transport: Transport, job: str) -> None:
    """Report that this controller leaves the job to another one. Without the report the cluster
    notices the missing heartbeats. A reader without control of the job reports nothing."""
    if transport.controller is not None:
        _report_detached(transport, job)


def warn_if_unfinished(job: "Job", transport: Transport) -> None:
    """Warn at the end of a script that its job has not ended, with failures that nobody read."""
    controller = transport.controller
    if (
        job.left.is_set()
        or job._is_inherited
        or controller is None
        or not _is_live(job.job, transport)
    ):
        return
    if controller.failure is not None:
        LOG.error("job %s: %s", job.job, controller.failure["message"])
    LOG.warning(
        "this script did not end its job %s:\nwithout a controller it is cancelled after its "
        "timeouts; use `with`, `finish()` or `cancel()`\n  resume it: %s\n  cancel it: %s",
        *(
            job.job,
            transport.location.attach_line(job.job),
            transport.location.cancel_line(job.job),
        ),
    )


def warn_of_former_jobs(transport: Transport, jobs: list[JobView], *, is_new: bool) -> None:
    """Warn of unfinished jobs without a controller, left by former scripts. If the cluster
    `is_new`, no job has a controller; the function reports them detached, which frees their GPUs.
    """
    former = [job for job in jobs if job["ended_at"] is None and (is_new or not job["attached"])]
    for job in former:
        if job["attached"]:
            _report_detached(transport, job["job"])
    location = transport.location
    if not former:
        return
    names = ", ".join(job["job"] for job in former[-FORMER_JOBS_MAX:])
    more = len(former) - FORMER_JOBS_MAX
    newest = former[-1]["job"]
    LOG.warning(
        "jobs of former scripts have not ended (jobs that wait can take their GPUs): %s%s\n"
        "  resume one: %s\n  cancel one: plexrl cancel %s --data-dir %s",
        *(names, f" and {more} more (`plexrl jobs`)" if more > 0 else ""),
        *(location.attach_line(newest), shlex.quote(newest)),
        shlex.quote(str(location.data_dir)),
    )


def _report_detached(transport: Transport, job: str) -> None:
    body = {"outcome": "detached", "reason": ""}
    path = f"/v1/jobs/{quote(job)}/finish"
    call = Call(method="POST", path=path, json=body).limited_to(LAST_REQUEST_S)
    try:
        transport.without_retries().request(call)
    except PlexRLError as error:
        LOG.info("the cluster did not receive that %s is detached: %s", job, error)


def _detach(job: "Job") -> bool:
    """Detach the job; whether to wait for a second Ctrl-C."""
    if job.left.is_set() or job._is_inherited or job.controller is None:
        return False
    location = job.place
    waits = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()
    LOG.warning(
        "job %s is detached: submitted operations continue%s.\n"
        "Without a controller it is cancelled after its reattach timeout.\n"
        "  resume it: %s\n  cancel it: %s%s",
        job.job,
        ",\nif need be in the next cluster on the data directory" if location.is_embedded else "",
        location.attach_line(job.job),
        location.cancel_line(job.job),
        f"\n  or press Ctrl-C again within {SECOND_INTERRUPT_S:g} s to cancel it" if waits else "",
    )
    job.detach()
    return waits


def _cancel(job: "Job") -> None:
    try:
        job.cancel("KeyboardInterrupt")
        LOG.warning("job %s is cancelled", job.job)
    except PlexRLError as error:
        LOG.warning("job %s could not be cancelled: %s", job.job, error)


def _is_live(job: str, transport: Transport) -> bool:
    """Whether the job goes on, by one quick heartbeat; this also fetches the job's failure."""
    if transport.is_closed:
        return True
    try:
        beat(transport.without_retries(), job, within_s=LAST_REQUEST_S)
    except (JobEndedError, ControllerReplacedError):
        return False
    except PlexRLError as error:
        LOG.warning("%s", error)
    return True
