"""The interface of a place of checkpoints. `choice` makes one of a path or URL."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from plexrl.statemanager.checkpoint.format.record import CheckpointRecord

Range = tuple[str, int, int]
"""File, first byte, number of bytes."""
Arrived = Callable[[Range, memoryview], None]
"""Callback: a range and its bytes."""


class FileStream(Protocol):
    """A file that is written from its start to its end: get `space`, fill it, `commit` it."""

    def space(self, nbytes: int) -> memoryview:
        """Memory for the next `nbytes` of the file. Raises as `finish`."""
        ...

    def commit(self, nbytes: int) -> None:
        """Record that `nbytes` of the space are filled."""
        ...

    def append(self, data: bytes) -> None:
        """Append bytes. Raises as `finish`."""
        ...

    def finish(self) -> None:
        """Store the rest.

        Raises:
            OSError: the file system failed.
            StoreUnavailableError: the object store does not answer.
        """
        ...


class Draft(Protocol):
    """A checkpoint that is being written; nobody sees it before `publish`. Methods raise `OSError`,
    `StorageFullError` and `StoreUnavailableError`."""

    def begin(self) -> None:
        """Start with no files, also after an earlier attempt. The checkpoint stays announced."""
        ...

    def join(self) -> bool:
        """Instead of `begin`: add files to what the draft's node has begun. False: it is not to be
        seen from this node."""
        ...

    def add(self, name: str, content: bytes) -> None:
        """Add a small file."""
        ...

    def stream(
        self, path: str, nbytes: int, *, space_bytes_max: int, replace: bool = False
    ) -> AbstractContextManager[FileStream]:
        """Add a large file of `nbytes`; it is dropped if the block ends before `finish`. `replace`
        one that another node may have begun."""
        ...

    def publish(self, record: CheckpointRecord, *, overwrite: bool) -> None:
        """Make the checkpoint visible as a whole, in place of one of that name if `overwrite`.

        Raises:
            CheckpointExistsError: the name exists.
        """
        ...

    def drop(self) -> None:
        """Delete the files, as far as possible."""
        ...


class OpenFiles(Protocol):
    """The large files of a published checkpoint, open for reading."""

    def size(self, file: str) -> int:
        """Size in bytes. Raises `FileNotFoundError`, `OSError`, `StoreUnavailableError`."""
        ...

    def read(self, file: str, start: int, buffer: memoryview) -> memoryview:
        """The bytes from `start` on, as many as `buffer` has, or fewer at the file's end. They are
        in `buffer`, or are a prefetched range. Raises as `size`."""
        ...

    def prefetch(self, ranges: Sequence[Range], arrived: Arrived) -> None:
        """Bring ranges here that are read next, where a private copy makes that quicker; `arrived`
        is called for each range of the copy, on any thread. Raises as `size`, and as `arrived`."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint as a user downloads it."""

    path: str
    """Relative to the checkpoint."""
    nbytes: int
    source: str
    """Where the bytes are. After an overwrite of the checkpoint they are gone, not others."""


class CheckpointPlace(Protocol):
    """The place of one checkpoint, which may not exist. Hashable; `str` is its path or URL."""

    @property
    def job(self) -> str:
        """Folder of the job."""
        ...

    @property
    def name(self) -> str:
        """Name of the checkpoint."""
        ...

    def exists(self) -> bool:
        """Whether the name is taken, by a complete or damaged checkpoint."""
        ...

    def read_record(self) -> CheckpointRecord:
        """The manifest.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptStateError: the manifest is damaged.
            StorageError: it cannot be read.
            StoreUnavailableError: the object store does not answer.
        """
        ...

    def written_ns(self) -> int:
        """Time of publication, in nanoseconds since the epoch. Raises `OSError`."""
        ...

    def open_files(self, record: CheckpointRecord) -> OpenFiles:
        """The files of the checkpoint with this manifest."""
        ...

    def announce(self, node: str) -> None:
        """Show all nodes that the checkpoint will be written. Raises as `Draft`'s methods, and
        `StorageError`."""
        ...

    def announce_end(self, node: str) -> None:
        """End what `announce` began. A published checkpoint stays."""
        ...

    def renew(self, node: str) -> None:
        """Show that the node lives, for its announcement. Raises `OSError` and as
        `read_record`."""
        ...

    def announced(self) -> dict[str, str]:
        """The nodes that have announced it, each with a text that `renew` changes."""
        ...

    def draft(self, node: str) -> Draft:
        """A new checkpoint for this place; it was announced."""
        ...

    def delete(self, node: str) -> None:
        """Delete the checkpoint. It loses its name first, so that no reader finds a part of it.

        Raises:
            FileNotFoundError: there is no checkpoint.
            OSError: the file system refuses.
        """
        ...

    def share(self, job: str, name: str, node: str) -> None:
        """Make this checkpoint the checkpoint `name` of `job`, too, without a copy of its bytes.

        Raises:
            CheckpointExistsError: the name exists.
            InvalidRequestError: this place cannot.
            OSError: the file system refuses, or has no hard links.
        """
        ...

    def files(self) -> list[StoredFile]:
        """All files of a complete checkpoint, with paths relative to it. Raises as
        `read_record`."""
        ...

    def read_range(self, file: StoredFile, start: int, stop: int) -> bytes:
        """Bytes of one of `files`. Raises `OSError` and as `read_record`."""
        ...


class CheckpointRoot(Protocol):
    """The checkpoints of all jobs: `<root>/<job>/<name>`. Methods raise `StoreUnavailableError`."""

    def place(self, job: str, name: str) -> CheckpointPlace:
        """The place of a checkpoint."""
        ...

    def complete(self, job: str) -> Iterator[tuple[CheckpointPlace, CheckpointRecord]]:
        """Every complete checkpoint of a job, by name; damaged ones are skipped."""
        ...

    def sweep(self, node: str) -> list[str]:
        """Remove what an earlier process of this node left unfinished; returns its places."""
        ...

    def collect_garbage(self, job: str) -> None:
        """Remove files of a job that belong to no checkpoint and that nobody writes."""
        ...

    def use(self, jobs: Iterable[str], but: tuple[str, str] | None) -> tuple[int, int]:
        """Number and bytes of the jobs' checkpoints, also of those that are being written, without
        the checkpoint `but` (job, name). Bytes that several share count once. Raises `OSError`."""
        ...

    def capacity_bytes(self) -> int | None:
        """Size of the file system; None: not bounded. Raises `OSError`."""
        ...
