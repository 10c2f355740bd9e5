"""`plexrl jobs` and `plexrl logs`: jobs and their workers' logs."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.jobs.explain import print_warnings
from plexrl.cli.terminal.context import (
    Access,
    Cells,
    Output,
    print_line,
    warn,
    write_json,
    write_text,
)
from plexrl.cli.terminal.job_ids import JobArgument, find_job, is_live, new_lines, paced_line
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import InvalidRequestError
from plexrl.wire.messages.node_queries import JobLogs, LogView
from plexrl.wire.messages.views import DeploymentStatus, JobView

if TYPE_CHECKING:
    from plexrl.client.blocking.job import Job
    from plexrl.wire.messages.workers import EngineView

POLL_S = 1.0
"""Interval between two looks at logs that are followed."""
FOLLOWED_LINES = 1000
"""Lines of each worker that a look reads; what a worker writes beyond it in between is left out."""
STATES = (
    *("QUEUED", "ADMITTED", "PROFILING", "RUNNING", "SUSPENDED"),
    *("CANCELLED", "COMPLETED", "FAILED"),
)


@with_option_groups
def jobs(
    job: Annotated[
        str | None,
        typer.Argument(help="Show one job in full: its id, a prefix of it, or its name."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Include ended jobs.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only jobs in this state, such as queued or failed; may be repeated."),
    ] = None,
    *,
    access: Access,
    output: Output,
) -> None:
    """Jobs: which run, which wait, and where their models are."""
    wanted = _states(state)
    with access.open() as cluster:
        if job is not None:
            one = find_job(cluster, job)
            view = one.status()
            _show_one(view, _with_engines(one, view), output)
            return
        known = cluster.jobs()
    if wanted:
        found = [each for each in known if each["state"] in wanted]
    else:
        found = known if every else [each for each in known if is_live(each)]
    cells: Cells = {
        "job": "job",
        "tenant": "tenant",
        "state": "state",
        "attached": lambda each: "yes" if each["attached"] else "no",
        "waits": _waits,
        "deployments": residencies,
    }
    output.table(cells, found)
    if output.as_json:
        return
    for each in found:
        if each["reason"]:
            print_line(f"{each['job']}: {each['reason']}")
    left_out = len(known) - len(found)
    if left_out and not every and not wanted:
        warn(f"{left_out} ended jobs are not shown: use `plexrl jobs --all`")


def residencies(job: JobView) -> str:
    """Where the state of each of the job's deployments is, as text."""
    return ", ".join(
        f"{deployment['deployment'].rpartition('/')[2]} {deployment['residency']}"
        + (" (paced)" if deployment["pace"] else "")
        for deployment in job["deployments"]
    )


def _waits(job: JobView) -> str:
    """The part of its time that the job waited for others, and the greatest that it accepts."""
    parts = [deployment["waiting_part"] for deployment in job["deployments"]]
    worst = max((part for part in parts if part is not None), default=None)
    return f"{'-' if worst is None else f'{worst:.0%}'} of {job['slo']:.0%}"


def _states(given: list[str] | None) -> frozenset[str]:
    """The requested states; empty: no filter."""
    wanted = frozenset(each.upper() for each in given or ())
    if unknown := sorted(wanted - frozenset(STATES)):
        names = ", ".join(STATES).lower()
        raise InvalidRequestError(f"unknown state {unknown[0].lower()!r}: --state takes {names}")
    return wanted


def _show_one(job: JobView, deployments: list[DeploymentStatus], output: Output) -> None:
    fields = ("kind", "state", "residency", "groups", "workers", "pending")
    cells: Cells = {
        "deployment": lambda each: each["deployment"].rpartition("/")[2],
        **{field: field for field in fields},
        "groups": lambda each: " ".join(each["groups"]) or "-",
        "waits": lambda each: (
            "-" if each["waiting_part"] is None else f"{each['waiting_part']:.0%}"
        ),
        "engine": lambda each: "; ".join(map(_engine, each["engines"])),
    }
    if not output.as_json:
        print_line(
            f"{job['job']}: {job['name']} of {job['tenant']} is {job['state']}; it accepts "
            f"to wait {job['slo']:.0%} of its time."
        )
    output.table(cells, deployments, {**job, "deployments": deployments})
    if output.as_json:
        return
    for deployment in deployments:
        if deployment["pace"]:
            print_line(paced_line(deployment["deployment"], deployment["pace"]))
    print_warnings(job.get("health"))
    for text in (job["reason"], job["failure"] and job["failure"]["message"]):
        if text:
            print_line(text)


@with_option_groups
def logs(
    job: JobArgument,
    deployment: Annotated[str | None, typer.Option(help="Only this deployment's.")] = None,
    lines: Annotated[int, typer.Option(help="Last lines of each worker.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the job has ended.")
    ] = False,
    *,
    access: Access,
    output: Output,
) -> None:
    """The last lines of a job's worker logs."""
    with access.open() as cluster:
        found = find_job(cluster, job)
        answer = found.read_logs(deployment, lines=lines)
        if follow:
            _follow(found, deployment, answer, output)
            return
    for silent in answer["failed"]:
        warn(f"plexrl: no logs of node {silent['node']}: {silent['reason']}")
    if output.as_json:
        write_json(answer["logs"])
        return
    for log in answer["logs"]:
        write_text(f"==> {_where(log)} <==\n{log['text']}\n")


def _where(log: LogView) -> str:
    return f"{log['deployment']} rank {log['rank']} on {log['node']}"


def _follow(job: "Job", deployment: str | None, answer: JobLogs, output: Output) -> None:
    """Print the lines of `answer` and then new ones, until the job has ended. With JSON each line
    is an object."""
    before: dict[str, list[str]] = {}
    silent: set[str] = set()
    while True:
        is_over = not is_live(job.status())
        for node in answer["failed"]:
            if node["node"] not in silent:
                silent.add(node["node"])
                warn(f"plexrl: no logs of node {node['node']}: {node['reason']}")
        for log in answer["logs"]:
            where, now = _where(log), log["text"].splitlines()
            fresh = new_lines(before.get(where, []), now)
            before[where] = now
            for line in fresh:
                if output.as_json:
                    write_json({**log, "text": line})
                else:
                    write_text(f"{where}: {line}\n")
        if is_over:
            return
        time.sleep(POLL_S)
        answer = job.read_logs(deployment, lines=FOLLOWED_LINES)


def _with_engines(job: "Job", view: JobView) -> list[DeploymentStatus]:
    """A job's deployments with the state of their rollout engines."""
    deployments: list[DeploymentStatus] = []
    for deployment in view["deployments"]:
        rollout = deployment["kind"] == "rollout"
        engines = job.deployment_status(deployment["deployment"])["engines"] if rollout else []
        deployments.append({**deployment, "engines": engines})
    return deployments


def _engine(stats: "EngineView") -> str:
    """An engine as text, such as `3 run, 1 wait, cache 40 %, 2 preemptions`."""
    used = 100 * stats["blocks_held"] / stats["blocks"]
    paused = "paused, " if stats["paused"] else ""
    return (
        f"{paused}{stats['running']} run, {stats['waiting']} wait, cache {used:.0f} %, "
        f"{stats['preemptions']} preemptions"
    )
