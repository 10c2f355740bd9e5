"""Reads and writes tables in Parquet (extra `traces`) with one batch of rows in memory."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.errors import InvalidRequestError
from plexrl.traces.io.cells import defaults
from plexrl.traces.io.csv_file import Parsed, header_faults
from plexrl.traces.io.problems import Problem, Report
from plexrl.traces.schema import Column, Fault, Table, TraceSegment

if TYPE_CHECKING:
    import pyarrow

BATCH_ROWS = 4096
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
    except (OSError, pyarrow_or_refusal().ArrowException) as error:
        raise InvalidRequestError(f"{path} cannot be read as Parquet: {error}") from error


def column_names(path: Path) -> list[str]:
    """The names of a file's columns; raises like `read_parquet`."""
    try:
        return list(pyarrow_or_refusal().parquet.read_schema(path).names)
    except (OSError, pyarrow_or_refusal().ArrowException) as error:
        raise InvalidRequestError(f"{path} cannot be read as Parquet: {error}") from error


def _rows(batches: Iterable["pyarrow.RecordBatch"], table: Table[Any]) -> Iterator[Parsed]:
    absent = defaults(table)
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            values: dict[str, Any] = {}
            faults: list[Fault] = []
            for column in table.columns:
                value = row.get(column.name)
                values[column.name] = absent[column.name] if value is None else value
                if value is not None:
                    values[column.name], fault = _plain(column, value, absent[column.name])
                    faults += [(column.name, fault)] if fault else []
            yield number, values, faults


def _plain(column: Column, value: Any, absent: Any) -> tuple[Any, str]:
    """The value of a Parquet cell; pandas stores whole numbers as floats and None as NaN."""
    if value != value and not column.required:
        return absent, ""
    match column.type:
        case "integer" if type(value) is float and value.is_integer():
            return int(value), ""
        case "number" if type(value) is int:
            return float(value), ""
        case "segments":
            return _segments(value)
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
    """Writes valid rows; equal rows give equal bytes."""

    def __init__(self, path: Path, table: Table[Any]) -> None:
        self._table = table
        self._pyarrow = pyarrow_or_refusal()
        self._schema = arrow_schema(table)
        self._file = self._pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def write(self, rows: Iterable[Any]) -> None:
        """Append rows."""
        for row in rows:
            self._rows.append({name: _stored(getattr(row, name)) for name in self._table.names})
            if len(self._rows) == GROUP_ROWS:
                self._flush()

    def close(self) -> None:
        """Flush and close the file."""
        if self._rows:
            self._flush()
        self._file.close()

    def _flush(self) -> None:
        table = self._pyarrow.Table.from_pylist(self._rows, schema=self._schema)
        self._file.write_table(table)
        self._rows = []


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
    if not isinstance(value, tuple):
        return value
    return [
        {
            "function": each.function,
            "offset_s": each.offset_s,
            "duration_s": each.duration_s,
            "slack_s": each.slack_s,
        }
        for each in value
    ]


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
