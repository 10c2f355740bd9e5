"""One door to any trace: a file of ours, or a public one by its column layout."""

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
from plexrl.traces.io.files import check_header, rows, validate
from plexrl.traces.io.parquet_file import column_names
from plexrl.traces.io.problems import Problems, Report
from plexrl.traces.schema import JOBS, LENGTHS, TABLES, Table

MOST = 0.6
"""Part of our required columns by which a file is taken for one of ours with a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A trace being read."""

    path: Path
    format: str
    """`jobs` or `lengths`: of our own schema; else the name of a public trace's layout."""
    table: Table[Any]
    rows: Iterator[Any]
    """Good rows. Where bad ones are not to be skipped, it ends in an error that names them all."""
    problems: Problems
    """What was wrong with the rows up to now."""
    left_out: Counter[str]
    """Rows of a public trace that are no jobs, by reason."""


def open_trace(
    name: str | Path,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    on_problem: Report | None = None,
    draw: Draw | None = None,
) -> Source:
    """The trace at a path, or `bundled:NAME`; without `format` its header says what it is. `draw`
    says how many requests are drawn of a source that has distributions only.

    Raises:
        TraceError: its header is wrong; or it is of our own schema and has bad rows, which are not
            to be skipped. (Of a public trace that is known when `rows` ends.)
        InvalidRequestError: it cannot be read at all.
    """
    path = path_of(str(name))
    chosen = format or _format(path)
    problems = Problems(on_problem)
    if chosen in TABLES:
        table = TABLES[chosen]
        check_header(path, table)
        if not skip_bad:
            found = validate(path, table, on_problem)
            if not found.ok:
                raise found.problems.error(str(path))
        return Source(
            path=path,
            format=chosen,
            table=table,
            rows=rows(path, table, problems),
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
    """Read a trace to its end; the source tells its problems, the number its good rows."""
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
    # Most of our own columns: its faults are told by these.
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
