"""Opens any trace: a file of this schema, or a public trace by its column layout."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.traces.bundled import path_of
from plexrl.traces.convert.wandb_runs import is_run_export
from plexrl.traces.formats import detect, load, unknown_layout
from plexrl.traces.formats.nearest import nearest
from plexrl.traces.formats.servegen import Draw, client_files
from plexrl.traces.io.file_header import read_header
from plexrl.traces.io.files import read_table
from plexrl.traces.io.parquet_file import column_names
from plexrl.traces.io.problems import Problems, Report
from plexrl.traces.schema import JOBS, LENGTHS, TABLES, Table

MOST = 0.6
"""Part of this schema's required columns from which a file counts as a faulty file of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace being read."""

    path: Path
    format: str
    """`jobs` or `lengths` for this schema, else the name of a public trace's layout."""
    table: Table[Any]
    rows: Iterator[Any]
    """Valid rows. Unless bad rows are skipped, the iterator ends in an error that lists them."""
    problems: Problems
    """Faults of the rows read so far."""
    left_out: Counter[str]
    """Rows of a public trace that are not jobs, by reason."""


def open_trace(
    name: str | Path,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    on_problem: Report | None = None,
    draw: Draw | None = None,
) -> Source:
    """Open the trace at a path, or `bundled:NAME`; without `format` the header determines the
    layout. `draw`: number of requests to draw from a source of distributions.

    Raises:
        TraceError: the header is invalid; or the file is of this schema and has bad rows that are
            not skipped. (For a public trace, `rows` raises this at its end.)
        InvalidRequestError: the file cannot be read.
    """
    path = path_of(str(name))
    chosen = format or _format(path)
    problems = Problems(on_problem)
    if chosen in TABLES:
        table = TABLES[chosen]
        return Source(
            path=path,
            format=chosen,
            table=table,
            rows=read_table(path, table, skip_bad=skip_bad, on_problem=problems),
            problems=problems,
            left_out=Counter(),
        )
    loaded = load(path, chosen, problems, draw)
    return Source(
        path=path,
        format=chosen,
        table=loaded.table,
        rows=loaded.rows if skip_bad else _strict(loaded.rows, problems, str(path)),
        problems=problems,
        left_out=loaded.left_out,
    )


def check_trace(
    name: str | Path, *, format: str | None = None, on_problem: Report | None = None
) -> tuple[Source, int]:
    """Read a trace to its end; returns the source, with all problems, and the number of good
    rows."""
    source = open_trace(name, format=format, skip_bad=True, on_problem=on_problem)
    return source, sum(1 for _ in source.rows)


def _strict(found: Iterator[Any], problems: Problems, path: str) -> Iterator[Any]:
    yield from found
    if problems.count:
        raise problems.error(path)


def _format(path: Path) -> str:
    if path.name.endswith(".parquet"):
        names = set(column_names(path))
        return "lengths" if "output_tokens" in names else "jobs"
    if client_files(path):
        return "servegen"
    names = set(read_header(path).names)
    required = {
        table.name: {column.name for column in table.columns if column.required}
        for table in (JOBS, LENGTHS)
    }
    for table in (JOBS, LENGTHS):
        if required[table.name] <= names <= set(table.names):
            return table.name
    found = detect(path)
    if found is not None:
        return found
    # The file has most of this schema's columns, so report its faults by these.
    ours = {name: [(each,) for each in sorted(of)] for name, of in required.items()}
    own = nearest(names, ours, enough=MOST)
    if own:
        return own[0][0]
    if is_run_export(names):
        raise InvalidRequestError(
            f"{path} is the history of a W&B run, not a trace: make a job of it by `plexrl traces "
            "convert --from wandb`"
        )
    raise unknown_layout(path)
