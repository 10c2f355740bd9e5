"""Background queue of checkpoints: one is written at a time, and waiting ones pin their versions.

Invariants:

- An accepted checkpoint pins its versions until it is written, failed or cancelled.
- Checkpoints of one name are written in the order of their acceptance.
- A full file system delays a checkpoint and later ones of its name; it fails none.
- A clean exit finishes accepted checkpoints until a timeout; then it cancels the rest, and their
  callers request them again.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from plexrl.errors import (
    NotFoundError,
    OperationCancelledError,
    OverloadedError,
    PlexRLError,
    StorageFullError,
)
from plexrl.statemanager.checkpoint.folder import clean_up, retain, to_upload
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.checkpoint.requests import CheckpointReport, CheckpointState, UploadState
from plexrl.statemanager.checkpoint.upload import Uploads
from plexrl.statemanager.checkpoint.write.progress import Progress
from plexrl.statemanager.checkpoint.write.publish import announce, announce_end
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec, write_checkpoint
from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.statemanager.transfer.transport.reader import StateReader

LOG = logging.getLogger(__name__)

ENTRIES_MAX = 256
"""Number of finished checkpoints kept in memory; complete ones are also found on disk."""
RETRY_AFTER_S = 5.0
ROOM_RETRY_S = 1.0
"""Delay between attempts to write a checkpoint that does not fit the file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A requested checkpoint with its pinned versions."""

    wanted: CheckpointSpec
    seq: int
    stamps: tuple[str, ...]
    readers: Sequence[StateReader]
    held: ExitStack
    """Holds the versions and the descriptor; closed when the task ends."""
    extras_fd: int | None
    retention: RetentionPolicy | None


@dataclass(slots=True, eq=False)
class _Entry:
    task: Task
    progress: Progress
    state: CheckpointState = CheckpointState.WAITING
    error: PlexRLError | None = None
    over: threading.Event = field(default_factory=threading.Event)
    as_of: float = field(default_factory=time.time)


class CheckpointJobs:
    """A thread that writes checkpoints until `close`. Thread-safe."""

    def __init__(self, config: StateManagerConfig) -> None:
        """Removes unfinished checkpoints of an earlier daemon, and resumes its uploads."""
        self._config = config
        self._uploads = Uploads(config.checkpoint_upload_url)
        self._lock = threading.Lock()
        self._entries: OrderedDict[Path, _Entry] = OrderedDict()
        self._queue: queue.Queue[_Entry | None] = queue.Queue()
        self._active = 0
        clean_up(config.checkpoint_dir, config.node)
        # This reads every manifest, so it is skipped if there are no uploads.
        if self._uploads.is_enabled:
            for path in to_upload(config.checkpoint_dir, config.node):
                self._uploads.add(path)
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> CheckpointReport:
        """Accept a checkpoint; the writer then owns the task's resources.

        Raises:
            OverloadedError: too many wait already; the caller keeps the task's resources.
            StorageFullError: likewise, because the disk is full.
            StorageError: the job's folder cannot be written; the caller keeps the resources.
        """
        bytes_per_s = self._config.checkpoint_bytes_per_s or None
        entry = _Entry(task, Progress(bytes_per_s=bytes_per_s))
        with self._lock:
            if self._active > self._config.checkpoints_waiting_max:
                for one in self._entries.values():
                    if isinstance(one.error, StorageFullError):
                        # The queue does not move before there is free space.
                        raise one.error
                raise OverloadedError(
                    f"{self._active - 1} checkpoints wait on {self._config.node!r} already: try "
                    "again when one is written, or raise checkpoints_waiting_max",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._active += 1
            announce(task.wanted.target, task.wanted.node)
            self._entries.pop(task.wanted.target, None)
            self._entries[task.wanted.target] = entry
            self._forget_oldest()
            self._queue.put(entry)
        return self._report(entry)

    def find(self, target: Path) -> CheckpointReport | None:
        """The report of a checkpoint accepted since the start, if any."""
        with self._lock:
            entry = self._entries.get(target)
        return None if entry is None else self._report(entry)

    def is_active(self, target: Path, stamps: Sequence[str], asked_by: str) -> bool:
        """Whether the checkpoint of this request waits or is being written."""
        with self._lock:
            entry = self._entries.get(target)
            return (
                entry is not None
                and not entry.state.is_final
                and entry.task.stamps == tuple(stamps)
                and entry.task.wanted.asked_by == asked_by
            )

    def reports(self) -> list[CheckpointReport]:
        """Reports of all checkpoints in memory, the oldest first."""
        with self._lock:
            entries = list(self._entries.values())
        return [self._report(entry) for entry in entries]

    def upload_state(self, target: Path) -> tuple[UploadState, str | None]:
        """State of a checkpoint's upload, and the error if it failed."""
        return self._uploads.state(target)

    def cancel(self, target: Path) -> CheckpointReport:
        """Cancel a checkpoint; returns when its writing has ended.

        Raises:
            NotFoundError: no checkpoint of that name was requested since the start.
        """
        with self._lock:
            entry = self._entries.get(target)
        if entry is None:
            raise NotFoundError(
                f"no checkpoint {target.name!r} was requested since the StateManager started"
            )
        entry.progress.cancel()
        entry.over.wait()
        return self._report(entry)

    def close(self, timeout_s: float) -> None:
        """Finish accepted checkpoints; after `timeout_s` cancel the rest."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            entry.progress.cancel()
        self._thread.join()
        self._uploads.close()

    def _run(self) -> None:
        # Checkpoints that did not fit the disk, the oldest first. They are retried.
        held: list[_Entry] = []
        is_closing = False
        while held or not is_closing:
            try:
                entry = self._queue.get(timeout=ROOM_RETRY_S if held else None)
                is_closing = is_closing or entry is None
                due = [] if entry is None else [entry]
            except queue.Empty:
                due, held = held, []
            for entry in due:
                # An older checkpoint of that name is written first.
                is_behind = any(e.task.wanted.target == entry.task.wanted.target for e in held)
                if is_behind or not self._write(entry):
                    held.append(entry)

    def _write(self, entry: _Entry) -> bool:
        """Write a checkpoint. False: the disk is full; its versions stay pinned."""
        task, wanted = entry.task, entry.task.wanted
        error: PlexRLError | None = None
        with self._lock:
            # If a name was requested again, the newer one is reported; both are written.
            entry.state = CheckpointState.WRITING
        try:
            entry.progress.add(0)
            write_checkpoint(wanted, task.readers, task.extras_fd, entry.progress)
        except StorageFullError as full:
            if entry.error is None:
                LOG.warning("checkpoint %s waits for free space: %s", wanted.target, full)
            entry.error = full
            return False
        except PlexRLError as failure:
            LOG.warning("checkpoint %s failed: %s", wanted.target, failure)
            error = failure
        except Exception:
            LOG.exception("a checkpoint failed")
            error = PlexRLError("the checkpoint failed: see the StateManager's log")
        task.held.close()
        announce_end(wanted.target, wanted.node)
        self._end(entry, error)
        with self._lock:
            self._active -= 1
        entry.over.set()
        return True

    def _end(self, entry: _Entry, error: PlexRLError | None) -> None:
        """Record the outcome of a checkpoint, and apply its retention policy."""
        task, wanted = entry.task, entry.task.wanted
        entry.error = error
        if error is not None:
            is_cancelled = isinstance(error, OperationCancelledError)
            entry.state = CheckpointState.CANCELLED if is_cancelled else CheckpointState.FAILED
            return
        if wanted.upload:
            self._uploads.add(wanted.target)
        entry.state = CheckpointState.DURABLE
        LOG.info(
            "checkpoint %s: %d bytes in %.3f s",
            *(wanted.target, entry.progress.bytes_done, entry.progress.seconds),
        )
        if task.retention is not None:
            folder = wanted.target.parent
            in_use = self._uploads.pending(folder)
            try:
                gone = retain(folder, task.retention, wanted.node, in_use | {wanted.target.name})
            except OSError as failure:
                LOG.warning("old checkpoints in %s were not deleted: %s", folder, failure)
                return
            for name in gone:
                LOG.info("checkpoint %s was deleted by its job's retention policy", folder / name)

    def _report(self, entry: _Entry) -> CheckpointReport:
        wanted, progress = entry.task.wanted, entry.progress
        upload, upload_error = self._uploads.state(wanted.target)
        return CheckpointReport(
            job=wanted.target.parent.name,
            name=wanted.target.name,
            path=str(wanted.target),
            state=entry.state,
            seq=entry.task.seq,
            step=entry.task.seq if wanted.step is None else wanted.step,
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
            seconds=progress.seconds,
            as_of=entry.as_of,
            upload=upload,
            error=None if entry.error is None else entry.error.to_wire(),
            upload_error=upload_error,
        )

    def _forget_oldest(self) -> None:
        finished = [target for target, entry in self._entries.items() if entry.state.is_final]
        for target in finished[: max(0, len(self._entries) - ENTRIES_MAX)]:
            del self._entries[target]
