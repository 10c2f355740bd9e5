"""Reads, checks and writes trace files by their suffix: `.csv`, `.csv.gz` and `.parquet`.

All functions stream: a bounded part of a file is in memory.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from plexrl.errors import InvalidRequestError
from plexrl.traces.io.csv_file import CsvWriter, Parsed, fatal_header_faults, read_csv
from plexrl.traces.io.distinct import IN_MEMORY, DistinctKeys
from plexrl.traces.io.file_header import Header, header_error, read_header
from plexrl.traces.io.parquet_file import (
    ParquetWriter,
    arrow_schema,
    column_names,
    read_parquet,
)
from plexrl.traces.io.problems import NO_ROWS, Problem, Problems, Report
from plexrl.traces.schema import JOBS, LENGTHS, ResponseLength, Table, TraceJob, row_faults

if TYPE_CHECKING:
    import pyarrow

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of validating a whole file."""

    good: int
    """Number of valid rows."""
    problems: Problems

    @property
    def ok(self) -> bool:
        """Whether the file has no fault."""
        return self.problems.count == 0


def read_jobs(
    path: str | Path, *, skip_bad: bool = False, on_problem: Report | None = None
) -> Iterator[TraceJob]:
    """The jobs of a trace, in order of submission.

    Raises:
        TraceError: rows are bad and not skipped; the error lists all, and no row was yielded.
        InvalidRequestError: the file cannot be read.
    """
    return read_table(Path(path), JOBS, skip_bad=skip_bad, on_problem=on_problem)


def read_lengths(
    path: str | Path, *, skip_bad: bool = False, on_problem: Report | None = None
) -> Iterator[ResponseLength]:
    """The rows of a table of response lengths; raises like `read_jobs`."""
    return read_table(Path(path), LENGTHS, skip_bad=skip_bad, on_problem=on_problem)


def read_table(
    path: Path, table: Table[Row], *, skip_bad: bool = False, on_problem: Report | None = None
) -> Iterator[Row]:
    """Rows of any table; without `skip_bad` the file is first read once to check it."""
    check_header(path, table)
    if not skip_bad:
        checked = validate(path, table, on_problem)
        if not checked.ok:
            raise checked.problems.error(str(path))
    return rows(path, table, on_problem or _ignore)


def check_header(path: Path, table: Table[Any]) -> None:
    """Check the header of a file.

    Raises:
        TraceError: the header is invalid; the error lists all faults.
        InvalidRequestError: the file cannot be opened, or its suffix is unknown.
    """
    if _format(path) == ".parquet":
        header = Header(kind="csv", line=0, names=tuple(column_names(path)))
    else:
        header = read_header(path)
        if header.kind != "csv":
            raise header_error(
                path, header.line, [("", f"begins a {header.kind}: a trace of {table.name} is CSV")]
            )
    faults = fatal_header_faults(table, header)
    if faults:
        raise header_error(path, header.line, faults)


def validate(path: Path, table: Table[Any], on_problem: Report | None = None) -> Validation:
    """All faults of a file; `on_problem` receives each as it is found."""
    problems = Problems(on_problem)
    good = sum(1 for _ in rows(path, table, problems))
    return Validation(good=good, problems=problems)


def rows(
    path: Path, table: Table[Row], report: Report, *, keys_in_memory: int = IN_MEMORY
) -> Iterator[Row]:
    """The valid rows of a file; faults of the others are reported, and so is a file without
    rows."""
    told = Problems(report)
    parsed = _parse(path, table, told)
    first = next(parsed, None)
    if first is None:
        if not told.count:
            line = 0 if _format(path) == ".parquet" else read_header(path).line
            report(Problem(line=line, field="", message=NO_ROWS))
        return
    yield from checked(chain((first,), parsed), table, report, keys_in_memory=keys_in_memory)


def checked(
    parsed: Iterable[Parsed],
    table: Table[Row],
    report: Report,
    *,
    keys_in_memory: int = IN_MEMORY,
) -> Iterator[Row]:
    """The valid rows among typed values."""
    last: Any = None
    with DistinctKeys(keys_in_memory) as keys:
        for line, values, unread in parsed:
            faults = row_faults(table, values, unread)
            if not faults and table.order is not None:
                value = values[table.order]
                if last is not None and value < last:
                    faults = [(table.order, f"decreases from {last!r} to {value!r}: sort the rows")]
            if not faults and table.key is not None and not keys.add(values[table.key]):
                faults = [(table.key, f"is repeated from an earlier row: {values[table.key]!r}")]
            for field, message in faults:
                report(Problem(line=line, field=field, message=message))
            if not faults:
                last = values[table.order] if table.order is not None else None
                yield table.row(**values)


def write_jobs(path: str | Path, jobs: Iterable[TraceJob]) -> int:
    """Write a trace atomically; returns the number of jobs.

    Raises:
        TraceError: a job is invalid; nothing is written.
        InvalidRequestError: there are no jobs, and a trace has at least one; nothing is written.
    """
    return write_table(Path(path), JOBS, jobs)


def write_lengths(path: str | Path, lengths: Iterable[ResponseLength]) -> int:
    """Write a table of response lengths, like `write_jobs`."""
    return write_table(Path(path), LENGTHS, lengths)


def write_table(path: Path, table: Table[Row], found: Iterable[Row]) -> int:
    """Write any table; raises like `write_jobs`."""
    problems = Problems()

    def typed() -> Iterator[Parsed]:
        for number, row in enumerate(found, 1):
            yield number, {name: getattr(row, name) for name in table.names}, []

    def good() -> Iterator[Sequence[Any]]:
        is_empty = True
        for row in checked(typed(), table, problems):
            is_empty = False
            yield [getattr(row, name) for name in table.names]
        if problems.count:
            raise problems.error(str(path))
        if is_empty:
            raise InvalidRequestError(
                f"{path} is not written: no row of {table.name} is left for it; exclude fewer rows"
            )

    return write_rows(path, table.names, lambda: arrow_schema(table), good())


def write_rows(
    path: Path,
    names: Sequence[str],
    schema: "Callable[[], pyarrow.Schema]",
    found: Iterable[Sequence[Any]],
) -> int:
    """Write rows under named columns atomically; returns their number. `schema`: of a Parquet file.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    suffix = _format(path)
    count = 0

    def counted() -> Iterator[Sequence[Any]]:
        nonlocal count
        for row in found:
            count += 1
            yield row

    try:
        with replacing(path) as partial, closing(_writer(partial, suffix, names, schema)) as writer:
            writer.write(counted())
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error
    return count


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which replaces it when the context ends; after an error the old
    file remains.

    Raises:
        OSError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace the contents of `path` atomically; raises like `replacing`."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def _ignore(problem: Problem) -> None:
    del problem


def _format(path: Path) -> str:
    name = path.name.lower()
    for suffix in (".csv", ".csv.gz", ".parquet"):
        if name.endswith(suffix):
            return suffix
    raise InvalidRequestError(f"{path}: a trace is a file named *.csv, *.csv.gz or *.parquet")


def _writer(
    path: Path, suffix: str, names: Sequence[str], schema: "Callable[[], pyarrow.Schema]"
) -> CsvWriter | ParquetWriter:
    if suffix == ".parquet":
        return ParquetWriter(path, schema())
    return CsvWriter(path, names, compressed=suffix == ".csv.gz")


def _parse(path: Path, table: Table[Any], report: Report) -> Iterator[Parsed]:
    if _format(path) == ".parquet":
        return read_parquet(path, table, report)
    return read_csv(path, table, report)
