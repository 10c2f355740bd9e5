"""The archive's files: each is one piece of the history, whole or not at all.

A file's name says what it holds, so a listing is the index and there is no other:

    KIND-SERIES-FIRST-LAST-BEGIN-END      events-000-…001-…020000-1764000000000-1764003600000

`events` has the events at positions FIRST to LAST of the journal. `state` has the snapshot of the
core after the event at FIRST (which is LAST). `runs` has the runs of the operations with these
indexes in the operation log. BEGIN and END are milliseconds on the scheduler's clock. A journal
that starts anew, or is restored from a backup, begins a new SERIES.

The contents carry a checksum over name and contents. A file that is damaged, or was renamed, is
not read.
"""

import hashlib
import re
import zlib
from dataclasses import dataclass
from typing import Final

from plexrl.errors import CorruptStateError

EVENTS: Final = "events"
STATE: Final = "state"
RUNS: Final = "runs"
_NAME: Final = re.compile(r"(events|state|runs)-(\d{3,})-(\d{15})-(\d{15})-(\d{13})-(\d{13})")
_DIGEST_BYTES: Final = 16
_LEVEL: Final = 6
"""Of zlib: a fifth fewer bytes than level 1; it runs beside the scheduler's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePiece:
    """One file of the archive."""

    kind: str
    series: int
    first: int
    last: int
    begin_ms: int
    end_ms: int
    nbytes: int = 0

    @property
    def name(self) -> str:
        """Its file name."""
        numbers = f"{self.first:015d}-{self.last:015d}-{self.begin_ms:013d}-{self.end_ms:013d}"
        return f"{self.kind}-{self.series:03d}-{numbers}"

    @property
    def begin(self) -> float:
        """Time of what it begins with, in seconds."""
        return self.begin_ms / 1000

    @property
    def end(self) -> float:
        """Time of what it ends with, in seconds."""
        return self.end_ms / 1000


def new_piece(
    kind: str, series: int, first: int, last: int, begin: float, end: float
) -> ArchivePiece:
    """A piece of the times `begin` to `end`, in seconds."""
    return ArchivePiece(
        kind=kind,
        series=series,
        first=first,
        last=last,
        begin_ms=int(begin * 1000),
        end_ms=-int(-end * 1000 // 1),
    )


def parse(name: str, nbytes: int) -> ArchivePiece | None:
    """The piece of that file name; None: it is no file of the archive."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    kind, *numbers = found.groups()
    series, first, last, begin_ms, end_ms = map(int, numbers)
    return ArchivePiece(
        kind=kind,
        series=series,
        first=first,
        last=last,
        begin_ms=begin_ms,
        end_ms=end_ms,
        nbytes=nbytes,
    )


def seal(name: str, body: bytes) -> bytes:
    """`body` compressed, with a checksum that holds for this name only."""
    packed = zlib.compress(body, _LEVEL)
    return _digest(name, packed) + packed


def unseal(name: str, content: bytes) -> bytes:
    """The body of `seal`. Raises `CorruptStateError`."""
    packed = content[_DIGEST_BYTES:]
    if content[:_DIGEST_BYTES] != _digest(name, packed):
        raise CorruptStateError(
            f"the file {name} of the archive is damaged: delete it; what it had is missing"
        )
    return zlib.decompress(packed)


def _digest(name: str, packed: bytes) -> bytes:
    return hashlib.blake2b(name.encode() + packed, digest_size=_DIGEST_BYTES).digest()
