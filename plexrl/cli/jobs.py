"""`plexrl jobs` and `plexrl logs`: what runs, and what its workers said."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.cli.context import (
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

if TYPE_CHECKING:
    from plexrl.client.cluster import Cluster


def jobs(
    job: Annotated[str | None, typer.Argument(help="Show this one in full.")] = None,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Jobs: who runs, who waits, where their models are."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = cluster.jobs() if job is None else [_with_engines(cluster, job)]
    output = Output(as_json)
    if job is not None:
        columns = ("kind", "state", "residency", "group", "workers", "pending")
        rows = [
            (
                d["deployment"].rpartition("/")[2],
                *(d[name] for name in columns),
                "; ".join(map(_engine, d["engines"])),
            )
            for d in found[0]["deployments"]
        ]
        title = f"{found[0]['name']} of {found[0]['tenant']}: {found[0]['state']}"
        output.table(title, ("deployment", *columns, "engine"), rows, found[0])
        for text in (found[0]["reason"], (found[0]["failure"] or {}).get("message")):
            if text and not as_json:
                print_line(text)
        return
    summary = [
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
    headings = ("job", "tenant", "state", "attached", "deployments")
    output.table("Jobs", headings, summary, found)
    for each in found:
        if each["reason"] and not as_json:
            print_line(f"{each['job']}: {each['reason']}")


def logs(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    deployment: Annotated[str | None, typer.Option(help="Only this deployment's.")] = None,
    lines: Annotated[int, typer.Option(help="Last lines of each worker.")] = 100,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """The ends of a job's worker logs."""
    with open_cluster(url, api_key, data_dir) as cluster:
        answer = cluster.attach_job(job, heartbeat=False).read_logs(deployment, lines=lines)
    for each in answer["failed"]:
        warn(f"plexrl: no logs of node {each['node']}: {each['reason']}")
    if as_json:
        write_json(answer["logs"])
        return
    for each in answer["logs"]:
        where = f"{each['deployment']} rank {each['rank']} on {each['node']}"
        write_text(f"==> {where} <==\n{each['text']}\n")


def _with_engines(cluster: "Cluster", job: str) -> dict[str, Any]:
    """A job with how the engines of its rollouts stand."""
    attached = cluster.attach_job(job, heartbeat=False)
    found = attached.status()
    for each in found["deployments"]:
        rollout = each["kind"] == "rollout"
        each["engines"] = (
            attached.deployment_status(each["deployment"])["engines"] if rollout else []
        )
    return found


def _engine(stats: dict[str, Any]) -> str:
    """`3 run, 1 waits, cache 40 %, 2 preemptions`."""
    used = 100 * stats["blocks_held"] / stats["blocks"]
    paused = "paused, " if stats["paused"] else ""
    return (
        f"{paused}{stats['running']} run, {stats['waiting']} wait, cache {used:.0f} %, "
        f"{stats['preemptions']} preemptions"
    )
