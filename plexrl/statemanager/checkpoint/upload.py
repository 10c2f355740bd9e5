"""Background uploads of complete checkpoints to any `fsspec` URL.

    <url>/<job>/<name>/…                 the checkpoint's files
    <url>/<job>/<name>/upload.json       written last: marks a complete remote checkpoint

A remote file with the right size and checksum is not sent again, so an interrupted upload resumes.
A failed upload is reported, and retried when the daemon starts; the checkpoint on the disk is
complete anyway. A finished upload also writes `upload.json` into the local checkpoint.
"""

import logging
import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.checkpoint.requests import UploadState

if TYPE_CHECKING:
    from fsspec.spec import AbstractFileSystem

LOG = logging.getLogger(__name__)

UPLOAD_RECORD = "upload.json"
_PARTIAL_RECORD = "upload.partial.json"
ATTEMPTS_MAX = 6
BACKOFF_S = 1.0
"""Delay before the second attempt; doubles for each later one."""
CHUNK_BYTES = 8 << 20

_Files = dict[str, str]
"""Path relative to the checkpoint → hex xxh3-128 of the contents."""


def upload(
    filesystem: "AbstractFileSystem",
    root: str,
    checkpoint: Path,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> int:
    """Send the missing files, then the manifest; returns the bytes sent.

    `go_on` is called between chunks.

    Raises:
        OSError: the file system failed; the next attempt resumes.
        InterruptedError: `go_on` returned False.
    """
    target = f"{root}/{checkpoint.parent.name}/{checkpoint.name}"
    sent = 0
    wanted = sorted(
        path
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name not in (UPLOAD_RECORD, _PARTIAL_RECORD)
    )
    arrived = _read_files(filesystem, f"{target}/{_PARTIAL_RECORD}")
    complete = _read_files(filesystem, f"{target}/{UPLOAD_RECORD}")
    files: _Files = {}
    digests = {str(path.relative_to(checkpoint)): _digest(path, go_on) for path in wanted}
    if complete == digests:
        return 0
    if complete:
        # From here on the remote directory is incomplete.
        filesystem.rm(f"{target}/{UPLOAD_RECORD}")
    for path in wanted:
        name = str(path.relative_to(checkpoint))
        if {**complete, **arrived}.get(name) != digests[name] or not _has_size(
            filesystem, f"{target}/{name}", path.stat().st_size
        ):
            sent += _send(filesystem, path, f"{target}/{name}", go_on)
        files[name] = digests[name]
        _write_files(filesystem, f"{target}/{_PARTIAL_RECORD}", files)
    _write_files(filesystem, f"{target}/{UPLOAD_RECORD}", files)
    filesystem.rm(f"{target}/{_PARTIAL_RECORD}")
    return sent


class Uploads:
    """A thread that uploads one checkpoint after the other until `close`."""

    def __init__(
        self, url: str, *, backoff_s: float = BACKOFF_S, attempts_max: int = ATTEMPTS_MAX
    ) -> None:
        """An empty `url` disables uploads.

        Raises:
            InvalidRequestError: `fsspec`, or its package for this URL, is not installed.
        """
        self._url = url
        self._backoff_s = backoff_s
        self._attempts_max = attempts_max
        self._filesystem: AbstractFileSystem | None = None
        if url:
            self._filesystem, self._root = _open(url)
        self._lock = threading.Lock()
        self._states: dict[Path, tuple[UploadState, str | None]] = {}
        self._queue: queue.Queue[Path | None] = queue.Queue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    @property
    def is_enabled(self) -> bool:
        """Whether a URL is configured."""
        return self._filesystem is not None

    def add(self, checkpoint: Path) -> None:
        """Queue a complete checkpoint for upload, unless it is uploaded."""
        if (checkpoint / UPLOAD_RECORD).exists():
            self._set(checkpoint, UploadState.DONE)
            return
        self._set(checkpoint, UploadState.WAITING)
        self._queue.put(checkpoint)

    def state(self, checkpoint: Path) -> tuple[UploadState, str | None]:
        """State of a checkpoint's upload, and the error if it failed."""
        with self._lock:
            return self._states.get(checkpoint, (UploadState.NONE, None))

    def pending(self, folder: Path) -> frozenset[str]:
        """Names of the job's checkpoints that wait or are being uploaded."""
        with self._lock:
            return frozenset(
                path.name
                for path, (state, _) in self._states.items()
                if path.parent == folder and state == UploadState.WAITING
            )

    def close(self) -> None:
        """End after the current chunk; the next daemon resumes the rest."""
        self._closing.set()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (checkpoint := self._queue.get()) is not None:
            self._attempt(checkpoint)

    def _attempt(self, checkpoint: Path) -> None:
        for attempt in range(self._attempts_max):
            if self._closing.is_set():
                return
            try:
                if self._filesystem is None:
                    raise InvalidRequestError("checkpoint_upload_url is not set")
                sent = upload(
                    self._filesystem,
                    self._root,
                    checkpoint,
                    go_on=lambda: not self._closing.is_set(),
                )
            except InterruptedError:
                return
            # An exception of an fsspec implementation must not end the other uploads.
            except Exception as error:
                LOG.warning("attempt %d to upload %s: %r", attempt + 1, checkpoint, error)
                if attempt + 1 == self._attempts_max or self._filesystem is None:
                    self._set(checkpoint, UploadState.FAILED, repr(error))
                    return
                pause_s = self._backoff_s * 2**attempt
                self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            else:
                LOG.info("checkpoint %s: %d bytes uploaded", checkpoint, sent)
                self._note_done(checkpoint)
                self._set(checkpoint, UploadState.DONE)
                return

    def _note_done(self, checkpoint: Path) -> None:
        try:
            (checkpoint / UPLOAD_RECORD).write_bytes(msgspec.json.encode({"url": self._url}))
        except OSError as error:
            # The next daemon compares every file instead.
            LOG.warning("the upload of %s was not recorded: %s", checkpoint, error)

    def _set(self, checkpoint: Path, state: UploadState, error: str | None = None) -> None:
        with self._lock:
            self._states[checkpoint] = (state, error)


def _open(url: str) -> tuple["AbstractFileSystem", str]:
    try:
        import fsspec

        filesystem, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InvalidRequestError(
            f"checkpoint_upload_url {url!r} cannot be used ({error}): install "
            "plexrl[upload] and the package of that protocol"
        ) from error
    return filesystem, str(root)


def _send(
    filesystem: "AbstractFileSystem", path: Path, target: str, go_on: Callable[[], bool]
) -> int:
    filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
    sent = 0
    with path.open("rb") as source, filesystem.open(target, "wb") as out:
        while chunk := source.read(CHUNK_BYTES):
            if not go_on():
                raise InterruptedError
            out.write(chunk)
            sent += len(chunk)
    return sent


def _digest(path: Path, go_on: Callable[[], bool]) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            if not go_on():
                raise InterruptedError
            digest.update(chunk)
    return digest.hexdigest()


def _has_size(filesystem: "AbstractFileSystem", path: str, nbytes: int) -> bool:
    try:
        return bool(filesystem.size(path) == nbytes)
    except FileNotFoundError:
        return False


def _read_files(filesystem: "AbstractFileSystem", path: str) -> _Files:
    try:
        return msgspec.json.decode(filesystem.cat_file(path), type=_Files)
    except (FileNotFoundError, msgspec.MsgspecError):
        return {}


def _write_files(filesystem: "AbstractFileSystem", path: str, files: _Files) -> None:
    filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
    with filesystem.open(path, "wb") as out:
        out.write(msgspec.json.encode(files))
