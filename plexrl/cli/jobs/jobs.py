"""`plexrl jobs` and `plexrl logs`: jobs and their workers' logs."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.cli.terminal.context import (
    DATA_DIR,
    DataDir,
    Json,
    Key,
    Output,
    Url,
    open_cluster,
    print_line,
    warn,
    write_json,
    write_text,
)
from plexrl.cli.terminal.job_ids import JobArgument, find_job, is_live
from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from plexrl.client.blocking.job import Job

STATES = (
    *("QUEUED", "ADMITTED", "PROFILING", "RUNNING", "SUSPENDED"),
    *("CANCELLED", "COMPLETED", "FAILED"),
)


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
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Jobs: which run, which wait, and where their models are."""
    wanted = _states(state)
    with open_cluster(url, api_key, data_dir) as cluster:
        if job is not None:
            _show_one(_with_engines(find_job(cluster, job)), as_json=as_json)
            return
        known = cluster.jobs()
    if wanted:
        found = [each for each in known if each["state"] in wanted]
    else:
        found = known if every else [each for each in known if is_live(each)]
    rows = [
        (
            each["job"],
            each["tenant"],
            each["state"],
            "yes" if each["attached"] else "no",
            ", ".join(
                f"{d['deployment'].rsplit('/', 1)[1]} {d['residency']}" for d in each["deployments"]
            ),
        )
        for each in found
    ]
    Output(as_json).table("", ("job", "tenant", "state", "attached", "deployments"), rows, found)
    if as_json:
        return
    for each in found:
        if each["reason"]:
            print_line(f"{each['job']}: {each['reason']}")
    left_out = len(known) - len(found)
    if left_out and not every and not wanted:
        warn(f"{left_out} ended jobs are not shown: use `plexrl jobs --all`")


def _states(given: list[str] | None) -> frozenset[str]:
    """The requested states; empty: no filter."""
    wanted = frozenset(each.upper() for each in given or ())
    if unknown := sorted(wanted - frozenset(STATES)):
        names = ", ".join(STATES).lower()
        raise InvalidRequestError(f"unknown state {unknown[0].lower()!r}: --state takes {names}")
    return wanted


def _show_one(found: dict[str, Any], *, as_json: bool) -> None:
    columns = ("kind", "state", "residency", "group", "workers", "pending")
    rows = [
        (
            d["deployment"].rpartition("/")[2],
            *(d[name] for name in columns),
            "; ".join(map(_engine, d["engines"])),
        )
        for d in found["deployments"]
    ]
    if not as_json:
        print_line(f"{found['job']}: {found['name']} of {found['tenant']} is {found['state']}.")
    Output(as_json).table("", ("deployment", *columns, "engine"), rows, found)
    for text in (found["reason"], (found["failure"] or {}).get("message")):
        if text and not as_json:
            print_line(text)


def logs(
    job: JobArgument,
    deployment: Annotated[str | None, typer.Option(help="Only this deployment's.")] = None,
    lines: Annotated[int, typer.Option(help="Last lines of each worker.")] = 100,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """The last lines of a job's worker logs."""
    with open_cluster(url, api_key, data_dir) as cluster:
        answer = find_job(cluster, job).read_logs(deployment, lines=lines)
    for each in answer["failed"]:
        warn(f"plexrl: no logs of node {each['node']}: {each['reason']}")
    if as_json:
        write_json(answer["logs"])
        return
    for each in answer["logs"]:
        where = f"{each['deployment']} rank {each['rank']} on {each['node']}"
        write_text(f"==> {where} <==\n{each['text']}\n")


def _with_engines(job: "Job") -> dict[str, Any]:
    """A job's view with the state of its rollout engines."""
    found = job.status()
    for each in found["deployments"]:
        rollout = each["kind"] == "rollout"
        each["engines"] = job.deployment_status(each["deployment"])["engines"] if rollout else []
    return found


def _engine(stats: dict[str, Any]) -> str:
    """An engine as text, such as `3 run, 1 wait, cache 40 %, 2 preemptions`."""
    used = 100 * stats["blocks_held"] / stats["blocks"]
    paused = "paused, " if stats["paused"] else ""
    return (
        f"{paused}{stats['running']} run, {stats['waiting']} wait, cache {used:.0f} %, "
        f"{stats['preemptions']} preemptions"
    )
