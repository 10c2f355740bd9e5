"""`plexrl explain`: shows why a job waits or runs."""

from itertools import groupby
from typing import Any

from plexrl.cli.terminal.context import (
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
from plexrl.cli.terminal.job_ids import JobArgument, find_job

Plain = dict[str, Any]

IDLE_S = 60.0
"""Shorter idle times are normal between two steps."""


def explain(
    job: JobArgument,
    url: Url = None,
    api_key: Key = None,
    data_dir: DataDir = DATA_DIR,
    as_json: Json = False,
) -> None:
    """Why a job waits or runs as it does: its operations, its GPUs, and until when."""
    with open_cluster(url, api_key, data_dir) as cluster:
        view = find_job(cluster, job).explain()
    if as_json:
        write_json(view)
        return
    print_line(f"{view['name']} of {view['tenant']} is {view['state']}: {view['summary']}.")
    print_holders(view["holders"])
    _operations(view["operations"])
    _deployments(view["deployments"])
    for deployment in view["deployments"]:
        _attempts(deployment)
        _near(deployment)
    _quality(view["eta_quality"])


def print_holders(holders: list[Plain]) -> None:
    """Print the holders of the GPUs that the job waits for, and those that look abandoned."""
    if not holders:
        return
    rows = [
        (
            each["job"] or "another tenant's job",
            each["tenant"],
            each["gpus"],
            each["condition"],
            seconds(each["silent_s"]),
            seconds(each["idle_s"]),
            seconds(each["cancelled_in_s"]),
        )
        for each in holders
    ]
    times = ("controller silent for", "idle for", "cancelled in")
    print_table("Who has the GPUs", ("job", "tenant", "GPUs", "condition", *times), rows)
    for each in holders:
        if each["condition"] in ("detached", "silent") or (each["idle_s"] or 0.0) > IDLE_S:
            print_line("")
            print_line(_abandoned(each))


def _abandoned(holder: Plain) -> str:
    if holder["condition"] == "idle":
        what = (
            f"has run nothing for {seconds(holder['idle_s'])}; its controller is alive, so it "
            "keeps its GPUs until the job ends"
        )
    else:
        what = (
            f"has not ended, and its controller has been silent for "
            f"{seconds(holder['silent_s'])}; it is cancelled in "
            f"{seconds(holder['cancelled_in_s'])} unless a controller returns"
        )
    if holder["job"] is None:
        return f"A job of another tenant {what}. An operator can end it earlier."
    return f"{holder['job']} {what}. To end it now: plexrl cancel {holder['job']}"


def _operations(operations: list[Plain]) -> None:
    """Print one row for consecutive operations with the same cause, with the first one's times."""
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
    """A short form of `<job>:<name>`."""
    return operation.rpartition(":")[2][:8]


def _eta(operation: Plain) -> str:
    if operation["eta_s"] is None:
        return "unknown"
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
    columns = ("deployment", "state", "group", "nodes", "mode", "shift", "overlap", "moves", "why")
    print_table("Deployments", columns, rows)


def _attempts(deployment: Plain) -> None:
    if deployment["attempts"]:
        rows = [(each["way"], each["why"]) for each in deployment["attempts"]]
        columns = ("placement mode", "obstacle")
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
    print_table(f"Groups with the best gaps for {deployment['deployment']}", columns, rows)


def _quality(quality: Plain) -> None:
    print_line("")
    if not quality["estimates"]:
        print_line("No estimated start has been verified yet.")
        return
    print_line(
        f"The {quality['estimates']} estimated starts of this cluster so far had a mean error of "
        f"{seconds(quality['mean_error_s'])} and a mean delay of "
        f"{seconds(quality['mean_late_s'])}; {quality['slipped']} took over twice as long."
    )
