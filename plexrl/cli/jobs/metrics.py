"""`plexrl metrics`: shows the metrics that a job's controller logs with `job.log`."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from plexrl.cli.jobs.metrics_plot import trend, write_plot, write_plots
from plexrl.cli.terminal.context import (
    Access,
    Output,
    local_time,
    print_line,
    print_table,
    terminal_width,
    write_csv,
    write_json,
)
from plexrl.cli.terminal.job_ids import JobArgument, find_job, is_live
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.cli.terminal.tables import table_width
from plexrl.errors import InvalidRequestError
from plexrl.wire.messages.views import JobView, MetricsRow

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster
    from plexrl.client.blocking.job import Job

POLL_S = 1.0
"""Interval between polls for new rows."""

TREND_POINTS = 16
Row = MetricsRow


@with_option_groups
def metrics(
    job: JobArgument,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", help="Only metrics of this pattern: -m 'reward/*'."),
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Number of newest rows.")] = 20,
    every: Annotated[bool, typer.Option("--all", help="All rows.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new rows until the job has ended.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw all rows into this file: .png, .svg or .pdf.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    family: Annotated[
        bool, typer.Option("--family", help="Beside the jobs that it is related to by forks.")
    ] = False,
    *,
    access: Access,
    output: Output,
) -> None:
    """Metrics of a job, as its controller logs them: the newest rows, or a plot of all."""
    if as_csv and output.as_json:
        raise typer.BadParameter("--csv and --json are two formats: choose one")
    if follow and (plot is not None or as_csv):
        raise typer.BadParameter("--follow prints rows as they arrive: omit --plot and --csv")
    if family and (follow or as_csv):
        raise typer.BadParameter("--family has a table, --plot and --json: omit --follow and --csv")
    with access.open() as cluster:
        found = find_job(cluster, job)
        if family:
            _show_family(cluster, found, metric, plot, output)
            return
        rows = found.metrics()
        names = _chosen(found.job, rows, metric)
        known = [_only(row, names) for row in rows]
        newest = known if every else known[-last:]
        if follow:
            _follow(found, rows, newest, metric, output)
            return
    if plot is not None:
        write_plot(plot, found.name, known, names)
        if output.as_json:
            write_json({"path": str(plot), "metrics": names, "rows": len(known)})
        else:
            print_line(f"{plot}: {len(known)} rows are drawn.")
    elif output.as_json:
        write_rows(newest)
    elif as_csv:
        cells = [
            (row["step"], row["time"], *(row["values"].get(name, "") for name in names))
            for row in newest
        ]
        write_csv(("step", "time", *names), cells)
    elif not rows:
        print_line(f"{found.job} has logged nothing: `job.log(step, values)` adds a row.")
    else:
        _show(found.job, known, newest, names)


def _show_family(
    cluster: "Cluster",
    job: "Job",
    patterns: Sequence[str] | None,
    plot: Path | None,
    output: Output,
) -> None:
    """Print or draw the curves of a job and of its relatives."""
    members = family_of(cluster.jobs(), job.job)
    rows = {
        str(each["job"]): cluster.attach_job(each["job"], heartbeat=False).metrics()
        for each in members
    }
    names = _chosen(job.job, [row for each in rows.values() for row in each], patterns)
    if plot is not None:
        write_plots(plot, f"{job.name} and its forks", rows, names)
    if output.as_json:
        found = [{**_origin(each), "rows": [*map(_as_json, rows[each["job"]])]} for each in members]
        write_json(found)
        return
    for name in names:
        _print_curves(name, members, rows)


def _print_curves(name: str, members: Sequence[JobView], rows: Mapping[str, Sequence[Row]]) -> None:
    cells = []
    for each in members:
        values = [row["values"][name] for row in rows[each["job"]] if name in row["values"]]
        ends = (_number(values[-1]), _number(max(values))) if values else ("", "")
        origin = _origin(each)
        settings = " ".join(f"{key}={value}" for key, value in origin["settings"].items())
        step = "" if origin["forked_at"] is None else str(origin["forked_at"])
        cells.append((each["job"], step, settings, *ends, trend(values, TREND_POINTS)))
    print_table(name, ("job", "forked at", "settings", "last", "most", "trend"), cells)


class Origin(TypedDict):
    """A member of a family."""

    job: str
    parent: str | None
    forked_at: int | None
    settings: dict[str, str | float | bool]


def _origin(view: JobView) -> Origin:
    fork = view.get("fork")
    if fork is None:
        return {"job": view["job"], "parent": None, "forked_at": None, "settings": {}}
    return {
        "job": view["job"],
        "parent": fork["job"],
        "forked_at": fork["step"],
        "settings": fork["settings"],
    }


def family_of(jobs: Sequence[JobView], job: str) -> list[JobView]:
    """The jobs that `job` is related to by forks, with itself, the oldest first."""
    parents = {str(each["job"]): _origin(each)["parent"] for each in jobs}
    root = _root(parents, job)
    return [each for each in jobs if _root(parents, each["job"]) == root]


def _root(parents: Mapping[str, str | None], job: str) -> str:
    """The job that all of a family come from; a parent that was forgotten, too. Ids of forgotten
    jobs may be used again, for forks of their own forks: the first id of such a circle."""
    seen: list[str] = []
    while (parent := parents.get(job)) is not None:
        if job in seen:
            return min(seen[seen.index(job) :])
        seen.append(job)
        job = parent
    return job


def _chosen(job: str, rows: Sequence[Row], patterns: Sequence[str] | None) -> list[str]:
    """Names of the requested metrics, in the order of first appearance.

    Raises:
        InvalidRequestError: a pattern matches no metric.
    """
    known = list(dict.fromkeys(name for row in rows for name in row["values"]))
    if patterns is None:
        return known
    for pattern in patterns:
        if known and not any(fnmatchcase(name, pattern) for name in known):
            names = ", ".join(sorted(known))
            raise InvalidRequestError(f"{job} has logged no metric {pattern!r}. It has: {names}")
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _only(row: Row, names: Sequence[str]) -> Row:
    values = {name: row["values"][name] for name in names if name in row["values"]}
    return {**row, "values": values}


def write_rows(rows: Sequence[Row]) -> None:
    """Print rows as JSON."""
    write_json([_as_json(row) for row in rows])


def _as_json(row: Row) -> dict[str, object]:
    """The row in its wire form, because JSON has no non-finite numbers."""
    from plexrl.client.data.metric_rows import metrics_row

    return {**row, **metrics_row(row["step"], row["values"])}


def _show(job: str, known: Sequence[Row], newest: Sequence[Row], names: Sequence[str]) -> None:
    """Print the newest rows, in several tables if one is too wide, and at a terminal a summary of
    all rows."""
    width = terminal_width()
    for columns in _parts(newest, names, width):
        print_table("", ("step", *columns), _cells(newest, columns))
        if width is not None:
            print_line("")
    if width is not None:
        rows = []
        for name in names:
            values = [row["values"][name] for row in known if name in row["values"]]
            finite = [value for value in values if math.isfinite(value)] or values
            ends = (values[-1], min(finite), max(finite))
            rows.append((name, *map(_number, ends), trend(values, TREND_POINTS)))
        print_line(f"All {len(known)} rows of {job}:")
        print_table("", ("metric", "last", "least", "most", "trend"), rows)


def _parts(rows: Sequence[Row], names: Sequence[str], width: int | None) -> Iterator[list[str]]:
    """The metrics, split into tables that fit the width."""
    part: list[str] = []
    for name in names:
        wider = [*part, name]
        if part and width is not None:
            cells = [list(map(str, row)) for row in _cells(rows, wider)]
            if table_width(("step", *wider), cells) > width:
                yield part
                wider = [name]
        part = wider
    yield part


def _cells(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, ...]]:
    return [
        (str(row["step"]), *(_number(row["values"].get(name)) for name in names)) for row in rows
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _follow(
    job: "Job",
    rows: Sequence[Row],
    newest: Sequence[Row],
    patterns: Sequence[str] | None,
    output: Output,
) -> None:
    """Print each new row until the job has ended."""
    after = rows[-1]["index"] if rows else 0
    shown = newest
    while True:
        for row in shown:
            _print_row(row, output)
        view = job.status()
        fresh = job.metrics(after=after)
        if not fresh and not is_live(view):
            if not output.as_json:
                print_line(f"{job.job} has ended ({view['state'].lower()}).")
            return
        after = fresh[-1]["index"] if fresh else after
        wanted = ["*"] if patterns is None else patterns
        shown = [
            _only(row, [n for n in row["values"] if any(fnmatchcase(n, p) for p in wanted)])
            for row in fresh
        ]
        if not fresh:
            time.sleep(POLL_S)


def _print_row(row: Row, output: Output) -> None:
    if output.as_json:
        write_json(_as_json(row))
        return
    values = "  ".join(f"{name}={_number(value)}" for name, value in row["values"].items())
    print_line(f"{local_time(row['time'])}  step {row['step']}  {values}")
