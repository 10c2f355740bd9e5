"""`plexrl operations` and `plexrl trace`: the durations of a job's operations."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.terminal.context import Access, Cells, Output, print_line, seconds, write_json
from plexrl.cli.terminal.job_ids import JobArgument, find_job
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import StorageError

if TYPE_CHECKING:
    from plexrl.wire.messages.cluster_views import ErrorView

ERROR_MAX = 300
"""Most characters of an error message below the table."""


@with_option_groups
def operations(
    job: JobArgument,
    deployment: Annotated[str | None, typer.Option(help="Only this deployment's.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only this kind.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Number of newest operations.")] = 50,
    *,
    access: Access,
    output: Output,
) -> None:
    """A job's finished operations: seconds in the queue, in switches, in transfer, computing."""
    from plexrl.client.display.chrome_trace import operation_rows

    with access.open() as cluster:
        job = find_job(cluster, job).job
        known = list(operation_rows(cluster, job))
    of_deployment = [
        row
        for row in known
        if deployment in (None, row["deployment"], row["deployment"].rpartition("/")[2])
    ]
    found = [row for row in of_deployment if kind in (None, row["kind"])][-last:]
    if known and not found and not output.as_json:
        existing = {(row["deployment"].rpartition("/")[2], row["kind"]) for row in known}
        names = ", ".join(" ".join(pair) for pair in sorted(existing))
        print_line(f"{job} has no finished operations of that deployment and kind. It has: {names}")
        return
    cells: Cells = {
        "#": "index",
        "deployment": lambda row: row["deployment"].rpartition("/")[2],
        "kind": "kind",
        "state": "state",
        "queue": lambda row: seconds(row["queue_s"]),
        "switch": lambda row: seconds(row["switch_s"]),
        "transfer": lambda row: seconds(row["transfer_s"]),
        "compute": lambda row: seconds(row["compute_s"]),
    }
    output.table(cells, found)
    if not output.as_json:
        for row in found:
            if row["error"] is not None:
                print_line(f"#{row['index']} {row['state']}: {_error(row['error'])}")


def _error(error: "ErrorView") -> str:
    """An error's code and the beginning of its message; `--json` has the whole message."""
    text = f"{error['code']}: {error['message']}"
    return text if len(text) <= ERROR_MAX else text[: ERROR_MAX - 1] + "…"


@with_option_groups
def trace(
    job: Annotated[
        str | None,
        typer.Argument(help="The job's id, a prefix of it, or its name; default: all."),
    ] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("trace.json"),
    *,
    access: Access,
    output: Output,
) -> None:
    """Write a trace of operations and GPU holders for chrome://tracing or Perfetto."""
    from plexrl.client.display.chrome_trace import chrome_trace, operation_rows

    with access.open() as cluster:
        if job is not None:
            job = find_job(cluster, job).job
        # Rows of all jobs: others held the job's GPUs too, as far as the key may see them.
        found = chrome_trace(operation_rows(cluster), job)
    try:
        out.write_text(json.dumps(found))
    except OSError as error:
        raise StorageError(f"the trace cannot be written: {error}: name another --out") from error
    events = len(found["traceEvents"])
    if output.as_json:
        write_json({"path": str(out), "events": events})
        return
    print_line(f"{out}: {events} events. Open it at https://ui.perfetto.dev or chrome://tracing.")
