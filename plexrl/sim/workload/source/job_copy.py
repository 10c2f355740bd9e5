"""Copies a scenario's jobs to a local file, so that every run of a sweep reads them quickly.

Reading a public trace takes seconds: rows are checked, sorted and shaped. Each run of a sweep is a
process of its own and needs all jobs. So the first reader writes the jobs to a file in batches; a
reader of the copy holds one batch in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.traces import TraceJob

BATCH_JOBS = 256
_LENGTH_BYTES = 4

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCopy:
    """The jobs that `copy_jobs` wrote. Picklable, for processes of this machine."""

    path: str

    def jobs(self) -> Iterator[TraceJob]:
        """The jobs in their original order."""
        return read_batches(Path(self.path), TraceJob)


def copy_jobs(jobs: Iterable[TraceJob], path: Path) -> Iterator[TraceJob]:
    """The same jobs; `path` holds a complete copy after the last one.

    Raises:
        InvalidRequestError: the copy cannot be written.
    """
    rest = iter(jobs)
    with path.open("wb") as file:
        while batch := list(islice(rest, BATCH_JOBS)):
            write_batch(file, batch, "a copy of the jobs")
            yield from batch


def write_batch(file: IO[bytes], records: Sequence[object], what: str) -> None:
    """Append records that `read_batches` reads one batch at a time. `what`: name for messages.

    Raises:
        InvalidRequestError: the file cannot be written.
    """
    body = msgspec.msgpack.encode(records)
    try:
        file.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        file.flush()
    except OSError as error:
        raise InvalidRequestError(
            f"{what} cannot be written to {file.name}: {error.strerror}; free disk space or set "
            "TMPDIR"
        ) from error


def read_batches(path: Path, record: type[Record]) -> Iterator[Record]:
    """The records of a file of `write_batch`."""
    decoder = msgspec.msgpack.Decoder(list[record])  # type: ignore[valid-type]  # a runtime type
    with path.open("rb") as file:
        while head := file.read(_LENGTH_BYTES):
            yield from decoder.decode(file.read(int.from_bytes(head, "big")))
