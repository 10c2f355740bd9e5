"""Writes job rows: each run writes a file of its own, and one table combines the files of all runs.

Both stream with one batch of rows in memory, whatever the length of the trace.
"""

import csv
import gzip
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain, islice
from pathlib import Path
from types import NoneType
from typing import IO, Any, get_args, get_type_hints

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.sim.metrics.job_rows import JobRow
from plexrl.traces.io.parquet_file import pyarrow_or_refusal

SUFFIXES = (".csv", ".csv.gz", ".parquet")
BATCH_ROWS = 1024
_LENGTH_BYTES = 4


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
        each.name: next(
            kind for kind in (*get_args(hints[each.name]), hints[each.name]) if kind is not NoneType
        )
        for each in fields(JobRow)
    }
    return {**LEADING, **plain}


@contextmanager
def row_writer(path: Path) -> Iterator[Callable[[JobRow], None]]:
    """Writes the rows of one run; `path` is complete when the context ends.

    Raises:
        InvalidRequestError: the rows cannot be written.
    """
    encoder = msgspec.msgpack.Encoder()
    held: list[JobRow] = []
    with path.open("wb") as file:

        def flush() -> None:
            body = encoder.encode(held)
            held.clear()
            try:
                file.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
                file.flush()
            except OSError as error:
                raise InvalidRequestError(
                    f"rows of jobs cannot be written to {path}: {error.strerror}; free disk space "
                    "or set TMPDIR"
                ) from error

        def take(row: JobRow) -> None:
            held.append(row)
            if len(held) == BATCH_ROWS:
                flush()

        yield take
        flush()


def write_job_rows(path: Path, runs: Iterable[RunOfRows]) -> int:
    """Write one table of all runs' rows, CSV or Parquet by its suffix; returns the number of rows.
    The file is created or replaced atomically when it is complete.

    Raises:
        InvalidRequestError: the table cannot be written.
    """
    rows = chain.from_iterable(_rows(run) for run in runs)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = (_write_parquet if path.name.endswith(".parquet") else _write_csv)(part, path, rows)
        part.replace(path)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _rows(run: RunOfRows) -> Iterator[tuple[Any, ...]]:
    batch = msgspec.msgpack.Decoder(list[JobRow])
    names = [each.name for each in fields(JobRow)]
    lead = (run.run, run.policy, run.nodes, run.seed)
    with run.part.open("rb") as file:
        while head := file.read(_LENGTH_BYTES):
            for row in batch.decode(file.read(int.from_bytes(head, "big"))):
                yield (*lead, *(getattr(row, name) for name in names))


def _write_csv(part: Path, path: Path, rows: Iterable[tuple[Any, ...]]) -> int:
    count = 0
    with part.open("wb") as raw, _packed(raw, path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(column_types())
        for row in rows:
            writer.writerow(row)
            count += 1
        text.flush()
        text.detach()
    return count


@contextmanager
def _packed(raw: IO[bytes], path: Path) -> Iterator[Any]:
    if not path.name.endswith(".gz"):
        yield raw
        return
    # Without name and time, equal rows give equal bytes.
    with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
        yield file


def _write_parquet(part: Path, path: Path, rows: Iterable[tuple[Any, ...]]) -> int:
    del path
    arrow = pyarrow_or_refusal()
    kinds = {str: arrow.string(), int: arrow.int64(), float: arrow.float64()}
    schema = arrow.schema(
        [
            arrow.field(name, kinds[kind], nullable=name not in LEADING)
            for name, kind in column_types().items()
        ]
    )
    count = 0
    rest = iter(rows)
    with arrow.parquet.ParquetWriter(part, schema, compression="zstd") as writer:
        while batch := list(islice(rest, 32 * BATCH_ROWS)):
            columns = zip(zip(*batch, strict=True), schema, strict=True)
            arrays = [arrow.array(cells, field.type) for cells, field in columns]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            count += len(batch)
    return count
