"""Events as bytes: the file of an `events` piece."""

from collections.abc import Iterable, Sequence

import msgspec

from plexrl.scheduler.service.journal.history.pieces import (
    EVENTS,
    ArchivePiece,
    new_piece,
    seal,
    unseal,
)
from plexrl.scheduler.service.journal.journal import Journal, Row


class EventRows(msgspec.Struct, array_like=True):
    """Events without gaps, as the journal has them."""

    first: int
    """Position of the first."""
    times: list[float]
    bodies: list[str]
    """Each as `CODEC` encodes it; empty: a tenant had it deleted."""
    skipped: dict[int, list[str]] = msgspec.field(default_factory=dict)
    """Steps that a replay leaves out, by position (`skipped_steps`)."""


def encode_events(
    series: int, rows: Sequence[Row], skipped: dict[int, frozenset[str]]
) -> tuple[ArchivePiece, bytes]:
    """The piece of events without gaps, and its content."""
    piece = new_piece(EVENTS, series, rows[0][0], rows[-1][0], rows[0][1], rows[-1][1])
    own = {at: sorted(steps) for at, steps in skipped.items() if piece.first <= at <= piece.last}
    found = EventRows(piece.first, [at for _, at, _ in rows], [body for _, _, body in rows], own)
    return piece, repack(piece, found)


def repack(piece: ArchivePiece, rows: EventRows) -> bytes:
    """The content of `piece` with these rows."""
    return seal(piece.name, msgspec.msgpack.encode(rows))


def decode_events(piece: ArchivePiece, content: bytes) -> EventRows:
    """The rows of a piece. Raises `CorruptStateError`."""
    return msgspec.msgpack.decode(unseal(piece.name, content), type=EventRows)


def last_piece(pieces: Iterable[ArchivePiece], kind: str, series: int) -> ArchivePiece | None:
    """The piece of one kind with which a series ends; None: it has none."""
    own = [piece for piece in pieces if piece.kind == kind and piece.series == series]
    return max(own, key=lambda piece: piece.last, default=None)


def is_continued_by(journal: Journal, piece: ArchivePiece | None) -> bool:
    """Whether the events of the journal follow those of the piece with which a series ends. They do
    not if the journal is shorter, or has another event in that place: it began anew since."""
    if piece is None:
        return True
    rows = journal.rows(piece.last - 1, 1)
    if rows:
        (position, at, _), *_ = rows
        found = new_piece(EVENTS, piece.series, position, position, at, at)
        return position > piece.last or found.end_ms == piece.end_ms
    newest = journal.snapshot()
    return newest is not None and newest[0] >= piece.last
