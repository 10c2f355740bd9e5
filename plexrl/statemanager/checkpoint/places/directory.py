"""Checkpoints in a directory on a file system that all nodes share: `<root>/<job>/<name>/`."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import CheckpointNotFoundError, CorruptStateError, PlexRLError, StorageError
from plexrl.statemanager.checkpoint.format.record import (
    RECORD,
    CheckpointRecord,
    decode_record,
    encode_record,
)
from plexrl.statemanager.checkpoint.places.place import Arrived, Range, StoredFile
from plexrl.statemanager.checkpoint.write import publish
from plexrl.statemanager.checkpoint.write.stream import StreamFile

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectoryPlace:
    """One checkpoint as a directory."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def job(self) -> str:
        return self.path.parent.name

    @property
    def name(self) -> str:
        return self.path.name

    def exists(self) -> bool:
        return self.path.exists()

    def read_record(self) -> CheckpointRecord:
        file = self.path / RECORD
        try:
            return decode_record(file.read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:
            raise not_found(self.job, self.name) from error
        except OSError as error:
            raise unreadable(str(file), error) from error
        except CorruptStateError as error:
            raise damaged(str(self), error) from error

    def written_ns(self) -> int:
        return (self.path / RECORD).stat().st_mtime_ns

    def open_files(self, record: CheckpointRecord) -> "LocalFiles":
        del record
        return LocalFiles(self.path)

    def announce(self, node: str) -> None:
        publish.announce(self.path, node)

    def announce_end(self, node: str) -> None:
        publish.announce_end(self.path, node)

    def renew(self, node: str) -> None:
        publish.renew(self.path, node)

    def announced(self) -> dict[str, str]:
        return publish.announced(self.path)

    def draft(self, node: str) -> "DirectoryDraft":
        return DirectoryDraft(self.path, node)

    def delete(self, node: str) -> None:
        publish.delete(self.path, node)

    def share(self, job: str, name: str, node: str) -> None:
        publish.share(self.path, self.path.parent.parent / job / name, node)

    def files(self) -> list[StoredFile]:
        self.read_record()
        try:
            return [
                StoredFile(str(path.relative_to(self.path)), path.stat().st_size, str(path))
                for path in sorted(self.path.rglob("*"))
                if path.is_file()
            ]
        except OSError as error:
            raise unreadable(str(self), error) from error

    def read_range(self, file: StoredFile, start: int, stop: int) -> bytes:
        with Path(file.source).open("rb") as opened:
            return os.pread(opened.fileno(), stop - start, start)


class DirectoryRoot:
    """All jobs' checkpoints below one directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place(self, job: str, name: str) -> DirectoryPlace:
        return DirectoryPlace(self._folder / job / name)

    def complete(self, job: str) -> Iterator[tuple[DirectoryPlace, CheckpointRecord]]:
        for path in sorted((self._folder / job).glob(f"*/{RECORD}")):
            place = DirectoryPlace(path.parent)
            if place.name.startswith("."):
                continue
            try:
                yield place, place.read_record()
            except PlexRLError as error:
                LOG.warning("%s is skipped: %s", place, error)

    def sweep(self, node: str) -> list[str]:
        folders = sorted(path for path in self._folder.glob("*") if path.is_dir())
        return [str(left) for folder in folders for left in publish.sweep(folder, node)]

    def collect_garbage(self, job: str) -> None:
        """Delete nothing: a checkpoint is one directory, which its own deletion removes."""

    def use(self, jobs: Iterable[str], but: tuple[str, str] | None) -> tuple[int, int]:
        if not self._folder.exists():
            return 0, 0
        count = nbytes = 0
        seen: set[tuple[int, int]] = set()
        for job in {entry.name for entry in self._folder.iterdir()}.intersection(jobs):
            for path in (self._folder / job).glob("*"):
                name = path.name
                if but is not None and job == but[0] and _is_of(name, but[1]):
                    continue
                nbytes += _size(path, seen)
                count += not name.endswith((".gone", ".old"))
        return count, nbytes

    def capacity_bytes(self) -> int:
        above = self._folder if self._folder.exists() else self._folder.parent
        disk = os.statvfs(above)
        return disk.f_frsize * disk.f_blocks


class DirectoryDraft:
    """A checkpoint in a temporary directory, which is renamed."""

    def __init__(self, target: Path, node: str) -> None:
        self._target = target
        self._node = node
        self._part = publish.part_of(target, node)

    def begin(self) -> None:
        publish.begin(self._part)

    def join(self) -> bool:
        return self._part.is_dir()

    def add(self, name: str, content: bytes) -> None:
        (self._part / name).write_bytes(content)

    def stream(
        self, path: str, nbytes: int, *, space_bytes_max: int, replace: bool = False
    ) -> StreamFile:
        file = self._part / path
        file.parent.mkdir(exist_ok=True)
        if replace:
            file.unlink(missing_ok=True)
        return StreamFile(file, nbytes, space_bytes_max=space_bytes_max)

    def publish(self, record: CheckpointRecord, *, overwrite: bool) -> None:
        self.add(RECORD, encode_record(record))
        publish.publish(self._part, self._target, self._node, overwrite=overwrite)

    def drop(self) -> None:
        publish.announce_end(self._target, self._node)


class LocalFiles:
    """Files of a directory, opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open = ExitStack()
        self._fds: dict[str, int] = {}

    def size(self, file: str) -> int:
        return os.fstat(self._fd(file)).st_size

    def read(self, file: str, start: int, buffer: memoryview) -> memoryview:
        filled = 0
        while filled < len(buffer):
            got = os.preadv(self._fd(file), [buffer[filled:]], start + filled)
            if got == 0:
                break
            filled += got
        return buffer[:filled]

    def prefetch(self, ranges: Sequence[Range], arrived: Arrived) -> None:
        """Start no read: the kernel reads ahead."""

    def close(self) -> None:
        self._open.close()
        self._fds.clear()

    def _fd(self, file: str) -> int:
        if file not in self._fds:
            fd = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
            self._open.callback(os.close, fd)
            self._fds[file] = fd
        return self._fds[file]


def not_found(job: str, name: str) -> CheckpointNotFoundError:
    """The error for a checkpoint that does not exist."""
    return CheckpointNotFoundError(f"there is no checkpoint {name!r} in {job!r}")


def unreadable(path: str, error: OSError) -> StorageError:
    """The error for a file that cannot be read."""
    return StorageError(
        f"{path} cannot be opened ({error}): repair its permissions or the file system", file=path
    )


def damaged(place: str, error: CorruptStateError) -> CorruptStateError:
    """The error for a damaged manifest."""
    return CorruptStateError(
        f"checkpoint {place} is damaged ({error.message}): load another checkpoint", file=RECORD
    )


def _is_of(entry: str, name: str) -> bool:
    """Whether a folder is the checkpoint `name`, or a partial write of it."""
    return entry == name or (entry.startswith(f".{name}.") and entry.endswith(".part"))


def _size(path: Path, seen: set[tuple[int, int]]) -> int:
    """Bytes of the files below `path` that are not `seen` yet; forks share files."""
    nbytes = 0
    for folder, _, files in os.walk(path):
        for file in files:
            try:
                found = os.lstat(Path(folder) / file)
            except FileNotFoundError:
                # It was deleted or renamed meanwhile.
                continue
            if (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                nbytes += found.st_size
    return nbytes
