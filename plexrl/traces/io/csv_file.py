"""Reads and writes tables in CSV: UTF-8, one header line, empty cells for absent values."""

import csv
import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from plexrl.traces.io.cells import defaults, format_cell, parse_cells
from plexrl.traces.io.file_header import Header, column_faults
from plexrl.traces.io.problems import Problem, Report
from plexrl.traces.io.text_lines import cells
from plexrl.traces.schema import Fault, Table

Parsed = tuple[int, dict[str, Any], list[Fault]]
"""Line number, typed values, and parse errors."""


def read_csv(path: Path, table: Table[Any], report: Report) -> Iterator[Parsed]:
    """Each line as typed values whose bounds and consistency are not yet checked.

    Faults of the header are reported with its line number; without a required column no line is
    read.
    """
    found = cells(path, report)
    first = next(found, None)
    if first is None:
        report(Problem(line=0, field="", message="the file is empty: a header line is missing"))
        return
    header = [name.strip() for name in first[1]]
    faults = list(header_faults(table, header))
    for field, message in faults:
        report(Problem(line=first[0], field=field, message=message))
    if {name for name, _ in faults} & {column.name for column in table.columns}:
        return
    absent = defaults(table)
    columns = [
        (header.index(column.name), column) for column in table.columns if column.name in header
    ]
    for line, row in found:
        if len(row) != len(header):
            message = f"the row has {len(row)} cells but the header has {len(header)}"
            field = header[len(row)] if len(row) < len(header) else ""
            message = f"is missing: {message}" if field else message
            report(Problem(line=line, field=field, message=message))
            continue
        values, unread = parse_cells(columns, row, absent)
        yield line, values, unread


def fatal_header_faults(table: Table[Any], header: Header) -> list[Fault]:
    """Faults of the header that make all rows unusable: required columns that are missing, repeated
    or apparently misspelt."""
    needed = ((column.name,) for column in table.columns if column.required)
    faults = column_faults(header, needed, f"a trace of {table.name}")
    for name in dict.fromkeys(header.names):
        near = () if name in table.names else get_close_matches(name, table.names, n=1)
        if near and near[0] not in header.names:
            faults.append((name, f"is not a column: did you mean {near[0]}?"))
    return faults


def header_faults(table: Table[Any], header: list[str]) -> Iterator[Fault]:
    """All faults of a file's column names."""
    for column in table.columns:
        if column.required and column.name not in header:
            yield column.name, "is missing from the header"
        if header.count(column.name) > 1:
            yield column.name, "is repeated in the header"
    for name in dict.fromkeys(header):
        if name not in table.names:
            near = get_close_matches(name, table.names, n=1)
            yield name, "is not a column" + (f": did you mean {near[0]}?" if near else "")


class CsvWriter:
    """Writes rows of values; equal rows give equal bytes."""

    def __init__(self, path: Path, names: Sequence[str], *, compressed: bool) -> None:
        self._raw = path.open("wb")
        self._file: IO[bytes] = self._raw
        if compressed:
            # Without name and time, equal rows give equal bytes.
            packed = gzip.GzipFile(filename="", fileobj=self._raw, mode="wb", mtime=0)
            self._file = packed  # type: ignore[assignment]  # it writes like a file
        self._text = io.TextIOWrapper(self._file, encoding="utf-8", newline="")
        self._writer = csv.writer(self._text, lineterminator="\n")
        self._writer.writerow(names)

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows."""
        for row in rows:
            self._writer.writerow(map(format_cell, row))

    def close(self) -> None:
        """Flush and close the file."""
        self._text.close()
        self._raw.close()
