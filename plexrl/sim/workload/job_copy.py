"""Copies a scenario's jobs to a local file, so that every run of a sweep reads them quickly.

Reading a public trace takes seconds: rows are checked, sorted and shaped. Each run of a sweep is a
process of its own and needs all jobs. So the first reader writes the jobs to a file in batches; a
reader of the copy holds one batch in memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.traces import TraceJob

BATCH_JOBS = 256
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCopy:
    """The jobs that `copied` wrote. Picklable, for processes of this machine."""

    path: str

    def jobs(self) -> Iterator[TraceJob]:
        """The jobs in their original order."""
        batch = msgspec.msgpack.Decoder(list[TraceJob])
        with Path(self.path).open("rb") as file:
            while head := file.read(_LENGTH_BYTES):
                yield from batch.decode(file.read(int.from_bytes(head, "big")))


def copied(jobs: Iterable[TraceJob], path: Path) -> Iterator[TraceJob]:
    """The same jobs; `path` holds a complete copy after the last one.

    Raises:
        InvalidRequestError: the copy cannot be written.
    """
    encoder = msgspec.msgpack.Encoder()
    rest = iter(jobs)
    with path.open("wb") as file:
        while batch := list(islice(rest, BATCH_JOBS)):
            body = encoder.encode(batch)
            try:
                file.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
                file.flush()
            except OSError as error:
                raise InvalidRequestError(
                    f"a copy of the jobs cannot be written to {path}: {error.strerror}; free disk "
                    "space or set TMPDIR"
                ) from error
            yield from batch
