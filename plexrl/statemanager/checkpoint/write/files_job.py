"""Files of another node's checkpoint, written in the background and asked about."""

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack

from plexrl.errors import ExecutionError, PlexRLError
from plexrl.statemanager.checkpoint.format.record import TensorRecord
from plexrl.statemanager.checkpoint.requests import FilesReport
from plexrl.statemanager.checkpoint.write.progress import CheckpointProgress
from plexrl.statemanager.checkpoint.write.writer import CheckpointSpec, write_some_files
from plexrl.statemanager.store.receiving.reader import StateReader

LOG = logging.getLogger(__name__)


class FilesJob:
    """A thread that writes some files, until they are written or `end`."""

    def __init__(
        self,
        wanted: CheckpointSpec,
        files: Sequence[str],
        readers: Sequence[StateReader],
        held: ExitStack,
        *,
        bytes_per_s: int | None,
    ) -> None:
        """`held` holds what the readers need, and is closed at the end."""
        self._wanted = wanted
        self._files = files
        self._readers = readers
        self._held = held
        self._progress = CheckpointProgress(bytes_per_s=bytes_per_s)
        self._lock = threading.Lock()
        self._tensors: list[TensorRecord] = []
        """Tensors of the files that were written since the last report."""
        self._error: PlexRLError | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-files", daemon=True)
        self._thread.start()

    def report(self) -> FilesReport:
        """Its progress, and what was written since the last report."""
        with self._lock:
            tensors, self._tensors = tuple(self._tensors), []
            return FilesReport(
                bytes_done=self._progress.bytes_done,
                is_over=self._is_over,
                tensors=tensors,
                error=None if self._error is None else self._error.to_wire(),
            )

    def end(self) -> None:
        """Stop, if it is not over; returns when nothing is written any more."""
        self._progress.cancel()
        self._thread.join()

    def _run(self) -> None:
        error: PlexRLError | None = None
        try:
            write_some_files(
                self._wanted, self._files, self._readers, self._progress, self._written
            )
            LOG.info(
                "%d files of checkpoint %s for %s: %d bytes in %.3f s",
                *(len(self._files), self._wanted.target, self._wanted.node),
                *(self._progress.bytes_done, self._progress.seconds),
            )
        except PlexRLError as failure:
            LOG.warning("files of checkpoint %s: %s", self._wanted.target, failure)
            error = failure
        except Exception:
            LOG.exception("files of checkpoint %s", self._wanted.target)
            error = ExecutionError("files of a checkpoint failed: see the StateManager's log")
        self._held.close()
        with self._lock:
            self._error, self._is_over = error, True

    def _written(self, tensors: Sequence[TensorRecord]) -> None:
        with self._lock:
            self._tensors += tensors
