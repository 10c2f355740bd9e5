"""`plexrl jobs` and `plexrl logs`: what runs, and what its workers said."""

import json
import sys
from typing import Annotated

import typer

from plexrl.cli.context import DATA_DIR, DataDir, Json, Key, Output, Url, open_cluster


def jobs(
    job: Annotated[str | None, typer.Argument(help="Show this one in full.")] = None,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Jobs: who runs, who waits, where their models are."""
    with open_cluster(url, api_key, data_dir) as cluster:
        found = (
            cluster.jobs() if job is None else [cluster.attach_job(job, heartbeat=False).status()]
        )
    output = Output(as_json)
    if job is not None:
        columns = ("deployment", "kind", "state", "residency", "group", "workers", "pending")
        rows = [tuple(d[name] for name in columns) for d in found[0]["deployments"]]
        title = f"{found[0]['name']} of {found[0]['tenant']}: {found[0]['state']}"
        output.table(title, columns, rows, found[0])
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
            each["reason"],
        )
        for each in found
    ]
    headings = ("job", "tenant", "state", "attached", "deployments", "reason")
    output.table("Jobs", headings, summary, found)


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
        answer = cluster.attach_job(job, heartbeat=False).read_logs(deployment, lines)
    for each in answer["failed"]:
        sys.stderr.write(f"plexrl: no logs of node {each['node']}: {each['reason']}\n")
    if as_json:
        sys.stdout.write(json.dumps(answer["logs"]) + "\n")
        return
    for each in answer["logs"]:
        where = f"{each['deployment']} rank {each['rank']} on {each['node']}"
        sys.stdout.write(f"==> {where} <==\n{each['text']}\n")
