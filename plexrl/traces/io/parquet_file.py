"""Reads and writes tables in Parquet (extra `traces`) with one batch of rows in memory."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError
from plexrl.traces.io.cells import CellError, defaults, parse_cell
from plexrl.traces.io.csv_file import Parsed, header_faults
from plexrl.traces.io.problems import Problem, Report
from plexrl.traces.schema import Column, Fault, Table, TraceSegment

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 4096
CLOCKS = frozenset({"submit_s", "arrival_s"})
"""Columns that may be dates; they then count from the first row's date."""
GROUP_ROWS = 32_768
"""Rows of a row group; a reader holds about one group."""


def read_parquet(path: Path, table: Table[Any], report: Report) -> Iterator[Parsed]:
    """Each row as typed values, like `read_csv`; the line is the row number.

    Raises:
        InvalidRequestError: the file is not Parquet, or pyarrow is not installed.
    """
    parquet = pyarrow_or_refusal().parquet
    try:
        with path.open("rb") as raw:
            file = parquet.ParquetFile(raw, pre_buffer=False)
            names = file.schema_arrow.names
            faults = list(header_faults(table, names))
            for field, message in faults:
                report(Problem(line=0, field=field, message=message))
            if {name for name, _ in faults} & set(table.names):
                return
            known = [name for name in table.names if name in names]
            yield from _rows(file.iter_batches(BATCH_ROWS, columns=known), table)
    except (OSError, OverflowError, ValueError, pyarrow_or_refusal().ArrowException) as error:
        # Python has no dates after the year 9999, and Arrow has.
        raise InvalidRequestError(f"{path} cannot be read as Parquet: {error}") from error


def column_names(path: Path) -> list[str]:
    """The names of a file's columns; raises like `read_parquet`."""
    try:
        return list(pyarrow_or_refusal().parquet.read_schema(path).names)
    except (OSError, pyarrow_or_refusal().ArrowException) as error:
        raise InvalidRequestError(f"{path} cannot be read as Parquet: {error}") from error


def _rows(batches: Iterable["pyarrow.RecordBatch"], table: Table[Any]) -> Iterator[Parsed]:
    absent = defaults(table)
    first: dict[str, datetime] = {}
    number = 0
    for batch in batches:
        for row in _in_microseconds(batch).to_pylist():
            number += 1
            values: dict[str, Any] = {}
            faults: list[Fault] = []
            for column in table.columns:
                value = row.get(column.name)
                values[column.name] = absent[column.name] if value is None else value
                if isinstance(value, datetime) and column.name in CLOCKS:
                    value = value - first.setdefault(column.name, value)
                if value is not None:
                    values[column.name], fault = _plain(column, value, absent[column.name])
                    faults += [(column.name, fault)] if fault else []
            yield number, values, faults


def _in_microseconds(batch: "pyarrow.RecordBatch") -> Any:
    """The batch with times that Python can hold, because pandas writes nanoseconds; dates are in
    UTC, because differences of local time are wrong across a change of the clocks."""
    arrow = pyarrow_or_refusal()
    types = [
        arrow.timestamp("us")
        if arrow.types.is_timestamp(each.type)
        else arrow.duration("us")
        if arrow.types.is_duration(each.type)
        else each.type
        for each in batch.schema
    ]
    columns = [
        # Only nanoseconds lose digits; a coarser unit may not overflow silently.
        column if column.type == kind else column.cast(kind, safe=column.type.unit != "ns")
        for column, kind in zip(batch.columns, types, strict=True)
    ]
    return arrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _plain(column: Column, value: Any, absent: Any) -> tuple[Any, str]:
    """The value of a Parquet cell; pandas stores whole numbers as floats and None as NaN, and
    databases export numbers as decimals or text."""
    if column.type == "text":
        return (str(value) if type(value) is int else value), ""
    if isinstance(value, str):
        try:
            return (parse_cell(column, value) if value else absent), ""
        except CellError as error:
            return absent, str(error)
    if column.type == "segments":
        return _segments(value)
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, Decimal):
        value = int(value) if value == value.to_integral_value() else float(value)
    if value != value and not column.required:
        return absent, ""
    if column.type == "integer" and type(value) is float and value.is_integer():
        return int(value), ""
    if column.type == "number" and type(value) is int:
        return float(value), ""
    return value, ""


def _segments(value: Any) -> tuple[Any, str]:
    found = []
    try:
        for each in value:
            slack_s = each.get("slack_s")
            found.append(
                TraceSegment(
                    function=each["function"],
                    offset_s=float(each["offset_s"]),
                    duration_s=float(each["duration_s"]),
                    slack_s=0.0 if slack_s is None else float(slack_s),
                )
            )
    except (AttributeError, KeyError, TypeError, ValueError):
        return (), "is not a list of structs (function, offset_s, duration_s, slack_s)"
    return tuple(found), ""


class ParquetWriter:
    """Writes rows of values; equal rows give equal bytes."""

    def __init__(self, path: Path, schema: "pyarrow.Schema") -> None:
        self._arrow = pyarrow_or_refusal()
        self._schema = schema
        self._file = self._arrow.parquet.ParquetWriter(path, schema, compression="zstd")

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        """Append rows, as a new row group."""
        rest = iter(rows)
        while batch := list(islice(rest, GROUP_ROWS)):
            columns = zip(zip(*batch, strict=True), self._schema, strict=True)
            arrays = [self._arrow.array(map(_stored, of), each.type) for of, each in columns]
            self._file.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def arrow_schema(table: Table[Any]) -> "pyarrow.Schema":
    """The Parquet schema of a table."""
    arrow = pyarrow_or_refusal()
    segment = arrow.struct(
        [
            arrow.field("function", arrow.string(), nullable=False),
            *(
                arrow.field(name, arrow.float64(), nullable=False)
                for name in ("offset_s", "duration_s", "slack_s")
            ),
        ]
    )
    types = {
        "text": arrow.string(),
        "integer": arrow.int64(),
        "number": arrow.float64(),
        "segments": arrow.list_(segment),
    }
    fields = [
        arrow.field(column.name, types[column.type], nullable=column.nullable)
        for column in table.columns
    ]
    return arrow.schema(fields, metadata={"plexrl": f"{table.name}/{table.version}"})


def _stored(value: Any) -> Any:
    return [asdict(each) for each in value] if isinstance(value, tuple) else value


def pyarrow_or_refusal() -> Any:
    """The pyarrow library.

    Raises:
        InvalidRequestError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidRequestError(
            "Parquet needs pyarrow: pip install plexrl[traces], or use CSV"
        ) from error
    return pyarrow
