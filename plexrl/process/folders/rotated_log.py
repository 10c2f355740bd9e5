"""Log files that are bounded in size, and whose disk may fail without a word more than needed.

A process that opened a log for appending as its standard error cannot be told to open another file.
So its log is copied and then cut to nothing, while it writes on; what is written between the two is
lost.
"""

import asyncio
import logging
import os
import shutil
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

FILES = 4
"""Files of one log: the one that is written, and three older ones."""
QUIET_S = 60.0
"""Shortest time between two complaints about a log that cannot be written."""
OUTPUT_BYTES_MAX = 32 << 20
"""Bound on the output of one process: its log, and the copy of what was there before."""
CHECK_S = 10.0
LOG = logging.getLogger(__name__)


class RotatedLog(RotatingFileHandler):
    """Writes records to a file, which is rotated so that all files together stay below a bound.

    If the disk is full or fails, records are lost, and standard error says so once a minute: what
    the process does matters more than its log.
    """

    def __init__(self, path: Path, bytes_max: int) -> None:
        """`bytes_max` bounds all files together."""
        super().__init__(path, maxBytes=max(1, bytes_max // FILES), backupCount=FILES - 1)
        self._path = path
        self._complained_at = -QUIET_S
        self._lost: BaseException | None = None
        """Why the record that was handled last is not in the file; None: it is."""

    def handle_durably(self, record: logging.LogRecord) -> None:
        """Write a record; it is on the disk when this returns. Raises `OSError`: it is not. Other
        threads write on while the disk works: the event loop is one of them."""
        self.acquire()
        try:
            self._lost = None
            self.handle(record)
            if self._lost is not None:
                raise OSError(str(self._lost)) from self._lost
            assert self.stream is not None, "a record was written to it"
            # The file may be rotated in the meantime.
            file = os.dup(self.stream.fileno())
        finally:
            self.release()
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def handleError(self, record: logging.LogRecord) -> None:
        """Complain, at most once a minute."""
        del record
        self._lost = sys.exc_info()[1]
        now = time.monotonic()
        if now - self._complained_at >= QUIET_S:
            self._complained_at = now
            sys.stderr.write(f"the log {self._path} cannot be written: {sys.exc_info()[1]}\n")


async def keep_logs_bounded(folder: Path) -> None:
    """Bound each log of processes that append to theirs below the folder, until cancelled."""
    while True:
        await asyncio.to_thread(bound_logs, folder, OUTPUT_BYTES_MAX)
        await asyncio.sleep(CHECK_S)


def bound_logs(folder: Path, bytes_max: int) -> None:
    """Move the content of each log of half of `bytes_max` bytes or more to a file `NAME.log.1`."""
    for path in folder.rglob("*.log"):
        try:
            if path.stat().st_size >= bytes_max // 2:
                former = path.with_name(f"{path.name}.1")
                # Cut even if the disk has no room for a copy.
                try:
                    shutil.copyfile(path, former)
                finally:
                    os.truncate(path, 0)
        except OSError as error:
            LOG.warning("the log %s is not bounded: %s", path, error)
