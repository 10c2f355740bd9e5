"""Background queue of checkpoints: one is written at a time, and waiting ones pin their versions.

Invariants:

- An accepted checkpoint pins its versions until it is written, failed or cancelled.
- A checkpoint is announced from its acceptance to its end, and the announcement renewed. If a load
  ended the announcement, the checkpoint fails.
- Checkpoints of one name are written in the order of their acceptance.
- A full file system, or an object store that does not answer, delays a checkpoint and later ones of
  its name; it fails none.
- A clean exit finishes accepted checkpoints until a timeout; then it cancels the rest, and their
  callers request them again.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from plexrl.errors import (
    NotFoundError,
    OperationCancelledError,
    OverloadedError,
    PlexRLError,
    StorageFullError,
    StoreUnavailableError,
)
from plexrl.ids import JobId
from plexrl.statemanager.checkpoint.announcement import RENEW_S, lost_to_a_load
from plexrl.statemanager.checkpoint.folder import retain
from plexrl.statemanager.checkpoint.format.retention import RetentionPolicy
from plexrl.statemanager.checkpoint.places.choice import root_at
from plexrl.statemanager.checkpoint.places.place import CheckpointPlace, CheckpointRoot
from plexrl.statemanager.checkpoint.requests import CheckpointState
from plexrl.statemanager.checkpoint.write.other_nodes import OtherNodes
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec, write_checkpoint
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.store.receiving.reader import StateReader
from plexrl.wire.messages.node_queries import CheckpointView

LOG = logging.getLogger(__name__)

ENTRIES_MAX = 256
"""Number of finished checkpoints kept in memory; complete ones are also found on disk."""
RETRY_AFTER_S = 5.0
ROOM_RETRY_S = 1.0
"""Delay between attempts to write a checkpoint that cannot be stored yet."""
HELD = (StorageFullError, StoreUnavailableError)
"""Errors of conditions that pass."""


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
    others: OtherNodes | None = None
    """Other nodes that write a part of the files; absent: there are none."""


@dataclass(slots=True, eq=False)
class _Entry:
    task: Task
    progress: CheckpointProgress
    is_announced: bool = True
    state: CheckpointState = CheckpointState.WAITING
    error: PlexRLError | None = None
    over: threading.Event = field(default_factory=threading.Event)
    as_of: float = field(default_factory=time.time)


class CheckpointJobs:
    """A thread that writes checkpoints until `close`. Thread-safe."""

    def __init__(self, config: StateManagerConfig) -> None:
        """Removes unfinished checkpoints of an earlier daemon."""
        self._config = config
        self.root: CheckpointRoot | None = None
        if config.checkpoint_url:
            self.root = root_at(config.checkpoint_url)
        self._lock = threading.Lock()
        self._entries: OrderedDict[CheckpointPlace, _Entry] = OrderedDict()
        self._queue: queue.Queue[_Entry | None] = queue.Queue()
        self._active: list[_Entry] = []
        """Jobs that are not over, by time of acceptance."""
        self._clean_up()
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="announcements", daemon=True)
        self._renewing.start()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> CheckpointView:
        """Accept a checkpoint; the writer then owns the task's resources.

        Raises:
            OverloadedError: too many wait already; the caller keeps the task's resources.
            StorageFullError: likewise, because the disk is full.
            StorageError: the job's folder cannot be written; the caller keeps the resources.
            StoreUnavailableError: the object store does not answer; likewise.
        """
        bytes_per_s = self._config.checkpoint_bytes_per_s or None
        entry = _Entry(task, CheckpointProgress(bytes_per_s=bytes_per_s))
        with self._lock:
            if len(self._active) > self._config.checkpoints_waiting_max:
                for one in self._entries.values():
                    if isinstance(one.error, HELD):
                        # The queue does not move before there is space, or an answer.
                        raise one.error
                raise OverloadedError(
                    f"{len(self._active) - 1} checkpoints wait on {self._config.node!r} already: "
                    "try again when one is written, or raise checkpoints_waiting_max",
                    retry_after_s=RETRY_AFTER_S,
                )
            task.wanted.target.announce(task.wanted.node)
            self._active.append(entry)
            self._entries.pop(task.wanted.target, None)
            self._entries[task.wanted.target] = entry
            self._forget_oldest()
            self._queue.put(entry)
        return self._report(entry)

    def find(self, target: CheckpointPlace) -> CheckpointView | None:
        """The report of a checkpoint accepted since the start, if any."""
        with self._lock:
            entry = self._entries.get(target)
        return None if entry is None else self._report(entry)

    def is_active(self, target: CheckpointPlace, stamps: Sequence[str], asked_by: str) -> bool:
        """Whether the checkpoint of this request waits or is being written."""
        with self._lock:
            entry = self._entries.get(target)
            return (
                entry is not None
                and not entry.state.is_final
                and entry.task.stamps == tuple(stamps)
                and entry.task.wanted.asked_by == asked_by
            )

    def reports(self) -> list[CheckpointView]:
        """Reports of all checkpoints in memory, the oldest first."""
        with self._lock:
            entries = list(self._entries.values())
        return [self._report(entry) for entry in entries]

    def cancel(self, target: CheckpointPlace) -> CheckpointView:
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
        self._ended.set()
        self._renewing.join()

    def _run(self) -> None:
        # Checkpoints that could not be stored yet, the oldest first. They are retried.
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
        """Write a checkpoint. False: it cannot be stored yet; its versions stay pinned."""
        task, wanted = entry.task, entry.task.wanted
        error: PlexRLError | None = None
        with self._lock:
            # If a name was requested again, the newer one is reported; both are written.
            entry.state = CheckpointState.WRITING
        try:
            entry.progress.add(0)
            self._check_announced(entry)
            write_checkpoint(wanted, task.readers, task.extras_fd, entry.progress, task.others)
        except HELD as held:
            if entry.error is None:
                LOG.warning("checkpoint %s waits: %s", wanted.target, held)
            entry.error = held
            return False
        except PlexRLError as failure:
            LOG.warning("checkpoint %s failed: %s", wanted.target, failure)
            error = failure
        except Exception:
            LOG.exception("a checkpoint failed")
            error = PlexRLError("the checkpoint failed: see the StateManager's log")
        task.held.close()
        self._announce_end(entry)
        self._end(entry, error)
        with self._lock:
            self._active.remove(entry)
        entry.over.set()
        return True

    def _check_announced(self, entry: _Entry) -> None:
        wanted = entry.task.wanted
        if not entry.is_announced:
            wanted.target.announce(wanted.node)
            entry.is_announced = True
        elif wanted.node not in wanted.target.announced():
            raise lost_to_a_load(wanted.target, wanted.node)

    def _announce_end(self, entry: _Entry) -> None:
        """End the announcement of a checkpoint, and begin it for later ones of that name."""
        wanted = entry.task.wanted
        with self._lock:
            wanted.target.announce_end(wanted.node)
            later = [e for e in self._active if e.task.wanted.target == wanted.target]
            later.remove(entry)
            for each in later:
                each.is_announced = False
                # Otherwise it is announced when its turn comes.
                with suppress(PlexRLError):
                    wanted.target.announce(wanted.node)
                    each.is_announced = True

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            with self._lock:
                active = [entry.task.wanted for entry in self._active]
            for wanted in active:
                try:
                    wanted.target.renew(wanted.node)
                except (OSError, PlexRLError) as error:
                    LOG.info("the announcement of %s is not renewed: %s", wanted.target, error)

    def _end(self, entry: _Entry, error: PlexRLError | None) -> None:
        """Record the outcome of a checkpoint, and apply its retention policy."""
        task, wanted = entry.task, entry.task.wanted
        entry.error = error
        if error is not None:
            is_cancelled = isinstance(error, OperationCancelledError)
            entry.state = CheckpointState.CANCELLED if is_cancelled else CheckpointState.FAILED
            return
        entry.state = CheckpointState.DURABLE
        LOG.info(
            "checkpoint %s: %d bytes in %.3f s",
            *(wanted.target, entry.progress.bytes_done, entry.progress.seconds),
        )
        if task.retention is not None:
            assert self.root is not None
            job, in_use = wanted.target.job, frozenset({wanted.target.name})
            try:
                gone = retain(self.root, job, task.retention, wanted.node, in_use)
            except (OSError, PlexRLError) as failure:
                LOG.warning("old checkpoints of %s were not deleted: %s", job, failure)
                return
            for name in gone:
                LOG.info("checkpoint %s/%s was deleted by its job's retention policy", job, name)

    def _clean_up(self) -> None:
        if self.root is None:
            return
        try:
            for left in self.root.sweep(self._config.node):
                LOG.warning("%s was unfinished; removed", left)
        except StoreUnavailableError as error:
            # The next attempt to write these checkpoints, or the collection of garbage, does it.
            LOG.warning("unfinished checkpoints stay for now: %s", error)

    def _report(self, entry: _Entry) -> CheckpointView:
        wanted, progress = entry.task.wanted, entry.progress
        return CheckpointView(
            job=JobId(wanted.target.job),
            name=wanted.target.name,
            path=str(wanted.target),
            state=entry.state,
            seq=entry.task.seq,
            step=entry.task.seq if wanted.step is None else wanted.step,
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
            seconds=progress.seconds,
            as_of=entry.as_of,
            error=None if entry.error is None else entry.error.to_wire(),
        )

    def _forget_oldest(self) -> None:
        finished = [target for target, entry in self._entries.items() if entry.state.is_final]
        for target in finished[: max(0, len(self._entries) - ENTRIES_MAX)]:
            del self._entries[target]
