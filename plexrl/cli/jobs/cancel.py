"""`plexrl cancel`: cancels jobs."""

from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from plexrl.cli.terminal.context import Access, Output, print_line, warn, write_json
from plexrl.cli.terminal.job_ids import find_job, is_live
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import JobEndedError, PlexRLError

if TYPE_CHECKING:
    from plexrl.client.blocking.job import Job
    from plexrl.wire.messages.cluster_views import ErrorView
    from plexrl.wire.messages.views import DeploymentView, JobView


class CancelledJob(TypedDict):
    """A job that was cancelled."""

    job: str
    name: str
    tenant: str
    state: str
    operations_cancelled: int
    gpus_freed: int


class UncancelledJob(TypedDict):
    """A job that was not cancelled."""

    job: str
    error: "ErrorView"


@with_option_groups
def cancel(
    jobs: Annotated[
        list[str], typer.Argument(help="Ids of jobs, prefixes of ids, or jobs' names.")
    ],
    reason: Annotated[str, typer.Option(help="Reason recorded with the job.")] = "plexrl cancel",
    *,
    access: Access,
    output: Output,
) -> None:
    """Cancel jobs: their operations end, their GPUs become free, their checkpoints stay.

    There is no confirmation. If one of JOBS is unknown, none is cancelled. If one has ended, the
    others are cancelled, and the exit code is 1.
    """
    results: list[CancelledJob | UncancelledJob] = []
    is_refused = False
    with access.open() as cluster:
        named = {job.job: job for job in [find_job(cluster, name) for name in jobs]}
        for job in named.values():
            try:
                cancelled = _cancel(job, reason)
            except PlexRLError as error:
                is_refused = True
                results.append({"job": job.job, "error": error.to_wire()})
                if not output.as_json:
                    warn(f"plexrl: {error.message}")
            else:
                results.append(cancelled)
                if not output.as_json:
                    print_line(f"{job.job} is cancelled: {_released(cancelled)}.")
    if output.as_json:
        write_json(results)
    if is_refused:
        raise typer.Exit(1)


def _cancel(job: "Job", reason: str) -> CancelledJob:
    before = job.status()
    if is_live(before):
        job.finish("cancelled", reason)
        after = job.status()
        if after["state"] == "CANCELLED" and after["reason"] == reason:
            return {
                "job": job.job,
                "name": job.name,
                "tenant": before["tenant"],
                "state": after["state"],
                "operations_cancelled": _operations(before),
                "gpus_freed": sum(len(each["ranks"]) for each in _placed(before)),
            }
        # The job ended meanwhile for another reason.
        before = after
    raise JobEndedError(
        f"job {job.job!r} has ended ({before['state'].lower()}): there is nothing to cancel",
        reason=before["reason"],
    )


def _operations(view: "JobView") -> int:
    return sum(
        deployment["pending"] + len(deployment["running"]) for deployment in view["deployments"]
    )


def _placed(view: "JobView") -> "list[DeploymentView]":
    return [deployment for deployment in view["deployments"] if deployment["group"] is not None]


def _released(result: CancelledJob) -> str:
    operations, gpus = result["operations_cancelled"], result["gpus_freed"]
    ends = "1 operation ends" if operations == 1 else f"{operations} operations end"
    return f"{ends} unfinished, it releases {'1 GPU' if gpus == 1 else f'{gpus} GPUs'}"
