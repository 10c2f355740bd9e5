"""Resolves a job argument: an id, a name, or a prefix of an id."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.errors import InvalidRequestError, UnknownJobError
from plexrl.wire.messages.views import JobView

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster
    from plexrl.client.blocking.job import Job

CANDIDATES_MAX = 8
"""Most jobs that the error of an ambiguous argument names."""

JobArgument = Annotated[
    str, typer.Argument(help="The job's id, the beginning of it, or the job's name.")
]


def find_job(cluster: "Cluster", text: str) -> "Job":
    """Attach to the job with this id, or else this name, or else this prefix of its id, without
    sending heartbeats. Among several matches a single live job wins.

    Raises:
        UnknownJobError: no job matches.
        InvalidRequestError: several jobs match.
    """
    if text:
        try:
            return cluster.attach_job(text, heartbeat=False)
        except UnknownJobError:
            pass
        view = _matching(cluster.jobs(), text)
        if view is not None:
            return cluster.attach_job(view["job"], heartbeat=False)
    raise UnknownJobError(
        f"there is no job {text!r}, by id, by name or by the beginning of an id: "
        "`plexrl jobs --all` lists them"
    )


def is_live(view: Mapping[str, Any]) -> bool:
    """Whether a job has not ended."""
    return view["ended_at"] is None


def _matching(jobs: Sequence[JobView], text: str) -> JobView | None:
    for found in (
        [view for view in jobs if view["name"] == text],
        [view for view in jobs if view["job"].startswith(text)],
    ):
        live = [view for view in found if is_live(view)]
        if len(found) == 1 or len(live) == 1:
            return (live or found)[0]
        if found:
            names = [view["job"] for view in [*live, *(v for v in found if v not in live)]]
            shown = ", ".join(names[:CANDIDATES_MAX])
            more = f" and {len(names) - CANDIDATES_MAX} more" * (len(names) > CANDIDATES_MAX)
            raise InvalidRequestError(f"{text!r} may be {shown}{more}: give more of the job's id")
    return None


def paced_line(deployment: str, pace: str) -> str:
    """A sentence which says that a deployment is paced."""
    return f"{deployment} is paced ({pace}): its GPUs compute nothing."


def new_lines(before: Sequence[str], now: Sequence[str]) -> Sequence[str]:
    """The lines that the end of a log has now, and had not before: those after the longest end of
    `before` with which `now` begins or in which it contains `before`."""
    for skipped in range(len(before)):
        kept = before[skipped:]
        if list(now[: len(kept)]) == list(kept):
            return now[len(kept) :]
    # The first look at a log may have had fewer lines than the next ones.
    for start in range(len(now) - len(before), 0, -1):
        if before and list(now[start : start + len(before)]) == list(before):
            return now[start + len(before) :]
    return now
