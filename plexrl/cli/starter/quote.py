"""`plexrl quote`: when a job would start and end, what it would cost, and whom it would delay."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.cli.terminal.context import (
    Access,
    Cells,
    Output,
    print_line,
    print_records,
    seconds,
    write_json,
)
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import InvalidRequestError
from plexrl.wire.messages.overview_views import QuoteFiguresView, QuoteView

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster
    from plexrl.traces import TraceJob

ERRORS_MIN = 9
"""Earlier quotes below which intervals are wide guesses."""


@with_option_groups
def quote(
    script: Annotated[Path | None, typer.Argument(help="A controller, a Python file.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, after `--`.")
    ] = None,
    like: Annotated[str | None, typer.Option(help="A job with the same demand, by its id.")] = None,
    trace: Annotated[
        str | None, typer.Option(help="A row of a trace, as FILE or FILE:JOB_ID.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Cycles of the job.")] = None,
    priority: Annotated[int, typer.Option(help="Class, for --like and --trace.")] = 0,
    price: Annotated[float | None, typer.Option(min=0.0, help="Price of a GPU-hour.")] = None,
    *,
    access: Access,
    output: Output,
) -> None:
    """When a job would start and end, what it would cost, and whom it would delay.

    The job is a script, which is run until it would begin to work; or it is like another job
    (--like), or a row of a trace (--trace). Nothing is submitted.
    """
    if sum(each is not None for each in (script, like, trace)) != 1:
        raise typer.BadParameter("give a script, --like or --trace")
    if like is not None and steps is None:
        raise typer.BadParameter("--like needs --steps")
    with access.open() as cluster:
        if script is not None:
            body = declared_by(script, arguments or (), cluster)
            found = cluster.quotes.ask({**body, "steps": steps, "price": price})
        elif like is not None:
            found = cluster.quotes.like(like, steps=steps or 1, priority=priority, price=price)
        else:
            assert trace is not None, "one of the three is given"
            row = row_of(trace)
            found = cluster.quotes.ask(
                {**body_of(row), "steps": steps or row.cycles, "priority": priority, "price": price}
            )
    if output.as_json:
        write_json(found)
    else:
        _print(found)


def declared_by(script: Path, arguments: Sequence[str], cluster: "Cluster") -> Mapping[str, Any]:
    """The job and the deployments that a script declares, as a request for a quote.

    Raises:
        InvalidRequestError: it declares none; its output says why.
    """
    from plexrl.client.profiling.declared_job import FILE_VARIABLE, Declaration

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "declared.json"
        environment = {
            **os.environ,
            FILE_VARIABLE: str(file),
            "PLEXRL_URL": cluster.url,
            "PLEXRL_API_KEY": cluster.api_key,
        }
        if cluster.ca is not None:
            environment["PLEXRL_CA_FILE"] = os.fspath(cluster.ca)
        command = [sys.executable, os.fspath(script), *arguments]
        ended = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
        if not file.exists():
            raise InvalidRequestError(
                f"{script} created no job (exit code {ended.returncode}): it is quoted by what it "
                "creates after plexrl.connect()"
            )
        found = json.loads(file.read_text())
    return Declaration(job=found["job"], deployments=found["deployments"]).body()


def row_of(text: str) -> "TraceJob":
    """The row that `FILE` or `FILE:JOB_ID` names; the first one without a job.

    Raises:
        TraceError: the file cannot be read.
        InvalidRequestError: it has no such row.
    """
    from plexrl.traces import read_jobs

    path, colon, name = text.rpartition(":")
    if not colon or Path(text).exists():
        path, name = text, ""
    for row in read_jobs(Path(path)):
        if not name or row.job_id == name:
            return row
    raise InvalidRequestError(f"{path} has no job {name!r}")


def body_of(row: "TraceJob") -> dict[str, Any]:
    """The request for a quote of a row."""
    trace = None
    if row.period_s is not None and row.segments:
        segments = [
            {"offset_s": each.offset_s, "duration_s": each.duration_s, "slack_s": each.slack_s}
            for each in row.segments
        ]
        trace = {"period_s": row.period_s, "segments": segments, "jitter_s": row.jitter_s}
    return {
        "name": row.job_id,
        "expected_s": row.service_s,
        "slo": row.slo,
        "row": {
            "gpus": row.gpus,
            "rollout_gpus": row.rollout_gpus,
            "state_bytes": row.state_bytes or 1,
            "node_type": row.node_type,
            "trace": trace,
        },
    }


def _print(found: QuoteView) -> None:
    cells: Cells = {
        "way": "way",
        "GPUs": "gpus",
        "starts in": lambda each: seconds(each["start_s"]),
        "ends in": lambda each: seconds(each["end_s"]),
        "80 % interval of the end": _interval,
        "GPU-hours": lambda each: f"{each['gpu_hours']:.3f}",
        "cost": lambda each: "" if each["cost"] is None else f"{each['cost']:.2f}",
        "slowdown": lambda each: f"{each['slowdown']:.1%}",
        "delays": _delays,
    }
    print_records("", cells, [found["asked"], *found["alternatives"]])
    print_line("")
    for delayed in found["asked"]["delayed"]:
        print_line(
            f"{delayed['job']} would end {seconds(delayed['delay_s'])} later "
            f"({delayed['slowdown']:+.1%})."
        )
    others = found["asked"]["others"]
    if others["jobs"]:
        print_line(
            f"Jobs of other tenants that would end later: {others['jobs']}, "
            f"by {seconds(others['delay_s'])} in total."
        )
    print_line(_basis(found))


def _basis(found: QuoteView) -> str:
    text = (
        f"By {found['runs']} simulated futures of {found['live_jobs']} live jobs; the demand is "
        f"{found['knowledge']}."
    )
    if found["is_cut"]:
        text += (
            " The future is longer than was simulated: the end follows from the cycles until then."
        )
    if found["errors"] < ERRORS_MIN:
        text += (
            f" The intervals are guesses until {ERRORS_MIN} jobs with a quote have completed "
            f"({found['errors']} have)."
        )
    return text


def _interval(each: QuoteFiguresView) -> str:
    return f"{seconds(each['end_low_s'])} to {seconds(each['end_high_s'])}"


def _delays(each: QuoteFiguresView) -> str:
    count = len(each["delayed"]) + each["others"]["jobs"]
    total_s = each["others"]["delay_s"] + sum(one["delay_s"] for one in each["delayed"])
    return f"{count}, by {seconds(total_s)} in total" if count else "nobody"
