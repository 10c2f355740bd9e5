"""`plexrl explain`: a job's story, for people."""

from itertools import groupby
from typing import Annotated, Any

import typer

from plexrl.cli.context import (
    DATA_DIR,
    DataDir,
    Json,
    Key,
    Url,
    open_cluster,
    print_line,
    print_table,
    seconds,
    write_json,
)

Plain = dict[str, Any]


def explain(
    job: Annotated[str, typer.Argument(help="The job's id.")],
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Why a job waits or runs as it does: its operations, its GPUs, and until when."""
    with open_cluster(url, api_key, data_dir) as cluster:
        story = cluster.attach_job(job, heartbeat=False).explain()
    if as_json:
        write_json(story)
        return
    print_line(f"{story['name']} of {story['tenant']} is {story['state']}: {story['summary']}.")
    _operations(story["operations"])
    _deployments(story["deployments"])
    for deployment in story["deployments"]:
        _attempts(deployment)
        _near(deployment)
    _quality(story["eta_quality"])


def _operations(operations: list[Plain]) -> None:
    """One row for each run of operations that wait for the same; the first one's times."""
    if not operations:
        return
    rows = []
    for (deployment, reason, rule, holder), run in groupby(operations, key=_cause):
        first, *others = run
        more = f", {len(others)} more" if others else ""
        rows.append(
            (
                deployment.rpartition("/")[2],
                f"{first['kind']} {_short(first['operation'])}{more}",
                reason,
                rule,
                holder or "nobody",
                seconds(first["waited_s"]),
                _eta(first),
            )
        )
    columns = ("deployment", "operation", "reason", "rule", "group held by", "waited", "ETA")
    print_table("Operations", columns, rows)


def _cause(operation: Plain) -> tuple[Any, ...]:
    return tuple(operation[name] for name in ("deployment", "reason", "rule", "holder"))


def _short(operation: str) -> str:
    """Enough of `<job>:<name>` to tell it from its neighbours."""
    return operation.rpartition(":")[2][:8]


def _eta(operation: Plain) -> str:
    if operation["eta_s"] is None:
        return "not known"
    verb = "ends" if operation["rule"] == "running" else "starts"
    return f"{verb} in {seconds(operation['eta_s'])}"


def _deployments(deployments: list[Plain]) -> None:
    if not deployments:
        return
    rows = []
    for each in deployments:
        placement = each["placement"] or {}
        rows.append(
            (
                each["deployment"].rpartition("/")[2],
                each["state"],
                each["group"] or "none",
                ", ".join(each["nodes"]),
                placement.get("way"),
                seconds(placement.get("shift_s")),
                seconds(placement.get("overlap_s")),
                each["moves"],
                each["moved_because"],
            )
        )
    columns = ("deployment", "state", "group", "nodes", "way", "shift", "overlap", "moves", "why")
    print_table("Deployments", columns, rows)


def _attempts(deployment: Plain) -> None:
    if deployment["attempts"]:
        rows = [(each["way"], each["why"]) for each in deployment["attempts"]]
        columns = ("way of getting GPUs", "what is there")
        print_table(f"Why {deployment['deployment']} has no GPUs", columns, rows)


def _near(deployment: Plain) -> None:
    if not deployment["near"]:
        return
    rows = [
        (
            each["group"],
            ", ".join(each["members"]),
            seconds(each["shift_s"]),
            seconds(each["overlap_s"]),
            seconds(each["interference_s"]),
            f"{each['load']:.0%}",
        )
        for each in deployment["near"]
    ]
    columns = ("group", "members", "shift", "overlap", "interference", "load")
    print_table(f"Groups in whose gaps {deployment['deployment']} fits best", columns, rows)


def _quality(quality: Plain) -> None:
    if not quality["estimates"]:
        print_line("No estimate of a start has been checked yet.")
        return
    print_line(
        f"The {quality['estimates']} estimated starts of this cluster so far were wrong by "
        f"{seconds(quality['mean_error_s'])} on average and late by "
        f"{seconds(quality['mean_late_s'])}; {quality['slipped']} were missed by far."
    )
