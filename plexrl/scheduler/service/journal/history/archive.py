"""Where the archive lies: a folder, or a prefix of an object store; and what is kept there.

A file of the folder is flushed and renamed, an object appears as a whole: what has a name is whole.
All methods block.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from plexrl.errors import StorageFullError, StorageUnavailableError
from plexrl.process.folders.disk_errors import NO_SPACE
from plexrl.process.folders.durable_files import flush, make_folders_durably, write_durably
from plexrl.scheduler.service.journal.history.pieces import ArchivePiece, parse
from plexrl.storage.location import directory, is_url
from plexrl.storage.object_store import ObjectStore

DAY_S: Final = 86_400.0
RETRY_AFTER_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptHistory:
    """How much is kept: the oldest pieces beyond either bound are deleted."""

    days: float
    bytes_max: int


class Place(Protocol):
    """Files by name. Each method raises `OSError` or `StorageError` if the place fails."""

    def files(self) -> list[tuple[str, int]]:
        """Names and sizes of all files, in no order."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Store a file durably and as a whole, in place of one of that name."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """The bytes `start` to `stop` of a file. Raises `FileNotFoundError`."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, in this order; those that do not exist are passed over."""
        ...


class FolderPlace:
    """A folder of this machine, or on a mount. It is made at the first write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> list[tuple[str, int]]:
        """Also those that are only half written, under names of no piece."""
        found = []
        with suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                with suppress(FileNotFoundError):
                    found.append((path.name, path.stat().st_size))
        return found

    def write(self, name: str, content: bytes) -> None:
        """Flushed when it returns."""
        make_folders_durably(self._folder, mode=0o700)
        write_durably(self._folder / name, content, mode=0o600)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """A part of a file."""
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def delete(self, names: Sequence[str]) -> None:
        """One flush for all."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        if names:
            flush(self._folder)


class StorePlace:
    """The objects below an URL."""

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url)

    def files(self) -> list[tuple[str, int]]:
        """By one listing."""
        return [(found.key, found.nbytes) for found in self._store.find("")]

    def write(self, name: str, content: bytes) -> None:
        """One object."""
        self._store.write(name, content)

    def read(self, name: str, start: int, stop: int) -> bytes:
        """A part of an object."""
        return self._store.read_range(name, start, stop)

    def delete(self, names: Sequence[str]) -> None:
        """One by one."""
        self._store.delete(names)


class Archive:
    """The pieces at one location: a path, or the URL of a prefix in an object store."""

    def __init__(self, location: str) -> None:
        """Nothing is made or read yet.

        Raises:
            InvalidRequestError: the package of this protocol is not installed.
        """
        self.location = location
        self._place: Place = (
            StorePlace(location) if is_url(location) else FolderPlace(directory(location))
        )

    def pieces(self, *kinds: str) -> list[ArchivePiece]:
        """All pieces, or those of some kinds, in the order of series and positions.

        Raises:
            StorageError: the place fails; likewise in all methods.
        """
        with _as_storage_errors(self.location):
            named = [parse(name, nbytes) for name, nbytes in self._place.files()]
        found = [each for each in named if each is not None and (not kinds or each.kind in kinds)]
        return sorted(found, key=lambda each: (each.series, each.first, each.last, each.kind))

    def write(self, piece: ArchivePiece, content: bytes) -> None:
        """Store a piece; it survives a power cut when this returns."""
        with _as_storage_errors(self.location):
            self._place.write(piece.name, content)

    def read(self, piece: ArchivePiece, start: int = 0, stop: int | None = None) -> bytes | None:
        """A piece's content, or a part of it; None: it was deleted meanwhile."""
        with _as_storage_errors(self.location):
            try:
                return self._place.read(piece.name, start, piece.nbytes if stop is None else stop)
            except FileNotFoundError:
                return None

    def delete(self, pieces: Sequence[ArchivePiece]) -> None:
        """Delete pieces, the first one first."""
        with _as_storage_errors(self.location):
            self._place.delete([piece.name for piece in pieces])

    def clean(self) -> None:
        """Delete what a killed process left half written; only the one that writes may do so."""
        with _as_storage_errors(self.location):
            names = [name for name, _ in self._place.files()]
            self._place.delete([each for each in names if _is_unfinished(each)])


def expired(
    pieces: Iterable[ArchivePiece], kept: KeptHistory, now: float, wanted: int
) -> list[ArchivePiece]:
    """The pieces to delete, oldest first, so that `wanted` more bytes are within the bounds."""
    by_age = sorted(pieces, key=lambda each: (each.end_ms, each.series, each.first))
    excess = sum(each.nbytes for each in by_age) + wanted - kept.bytes_max
    oldest_s, found = now - kept.days * DAY_S, []
    for piece in by_age:
        if piece.end >= oldest_s and excess <= 0:
            break
        excess -= piece.nbytes
        found.append(piece)
    return found


def _is_unfinished(name: str) -> bool:
    stem, dot, ending = name.rpartition(".")
    return bool(dot) and ending == "part" and parse(stem, 0) is not None


@contextmanager
def _as_storage_errors(location: str) -> Iterator[None]:
    """Turn the errors of a disk into `StorageError`s that name the archive."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise StorageFullError(
                f"the archive {location} has no space ({error.strerror}): free some, or lower "
                "archive_bytes_max",
                retry_after_s=RETRY_AFTER_S,
            ) from error
        raise StorageUnavailableError(
            f"the archive {location} cannot be used ({error}): check its disk, mount and owner",
            retry_after_s=RETRY_AFTER_S,
        ) from error
