"""A copy of a scenario's jobs, on this machine: read quickly, as often as there are runs.

To find the jobs of a public trace takes seconds: its rows are checked, sorted and shaped. A sweep
needs them once a run, each in a process of its own, so they are written down as they come, in
batches, of which a reader holds one.
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
    """The jobs that `copied` wrote down. Picklable; for processes of this machine."""

    path: str

    def jobs(self) -> Iterator[TraceJob]:
        """As they came."""
        batch = msgspec.msgpack.Decoder(list[TraceJob])
        with Path(self.path).open("rb") as file:
            while head := file.read(_LENGTH_BYTES):
                yield from batch.decode(file.read(int.from_bytes(head, "big")))


def copied(jobs: Iterable[TraceJob], path: Path) -> Iterator[TraceJob]:
    """The jobs; `JobCopy` has them too when the last one has been taken.

    Raises:
        InvalidRequestError: there is no room for the copy.
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
                    f"a copy of the jobs cannot be written to {path}: {error.strerror}; make room, "
                    "or set TMPDIR"
                ) from error
            yield from batch
