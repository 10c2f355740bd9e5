"""Writes job rows: each run writes a file of its own, and one table combines the files of all runs.

Both stream with one batch of rows in memory, whatever the length of the trace.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from plexrl.errors import InvalidRequestError
from plexrl.sim.metrics.job_rows import JobRow
from plexrl.sim.workload.source.job_copy import read_batches, write_batch
from plexrl.traces.io.files import write_rows
from plexrl.traces.io.parquet_file import pyarrow_or_refusal

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".csv", ".csv.gz", ".parquet")
BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfRows:
    """One run of the table: the leading columns and the file of its rows."""

    run: int
    """Number of the run in `results.json`."""
    policy: str
    nodes: str
    seed: int
    part: Path
    """File that `row_writer` wrote."""


LEADING: dict[str, type] = {"run": int, "policy": str, "nodes": str, "seed": int}
"""Columns before those of `JobRow`."""


def column_types() -> dict[str, type]:
    """Columns of the table in order; those of `JobRow` may be empty."""
    hints = get_type_hints(JobRow)
    plain = {
        field.name: next(
            kind
            for kind in (*get_args(hints[field.name]), hints[field.name])
            if kind is not NoneType
        )
        for field in fields(JobRow)
    }
    return {**LEADING, **plain}


@contextmanager
def row_writer(path: Path) -> Iterator[Callable[[JobRow], None]]:
    """Writes the rows of one run; `path` is complete when the context ends.

    Raises:
        InvalidRequestError: the rows cannot be written.
    """
    held: list[JobRow] = []
    with path.open("wb") as file:

        def take(row: JobRow) -> None:
            held.append(row)
            if len(held) == BATCH_ROWS:
                write_batch(file, held, "rows of jobs")
                held.clear()

        yield take
        write_batch(file, held, "rows of jobs")


def write_job_rows(path: Path, runs: Iterable[RunOfRows]) -> int:
    """Write one table of all runs' rows, CSV or Parquet by its suffix; returns the number of rows.
    The file is created or replaced atomically when it is complete.

    Raises:
        InvalidRequestError: the table cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error
    return write_rows(
        path, list(column_types()), _schema, chain.from_iterable(_rows(run) for run in runs)
    )


def _rows(run: RunOfRows) -> Iterator[tuple[Any, ...]]:
    lead = (run.run, run.policy, run.nodes, run.seed)
    names = [field.name for field in fields(JobRow)]
    for row in read_batches(run.part, JobRow):
        yield (*lead, *(getattr(row, name) for name in names))


def _schema() -> "pyarrow.Schema":
    arrow = pyarrow_or_refusal()
    kinds = {str: arrow.string(), int: arrow.int64(), float: arrow.float64()}
    return arrow.schema(
        [
            arrow.field(name, kinds[kind], nullable=name not in LEADING)
            for name, kind in column_types().items()
        ]
    )
