"""Log files that are bounded in size, and whose disk may fail without a word more than needed."""

import logging
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

FILES = 4
"""Files of one log: the one that is written, and three older ones."""
QUIET_S = 60.0
"""Shortest time between two complaints about a log that cannot be written."""


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

    def handleError(self, record: logging.LogRecord) -> None:
        """Complain, at most once a minute."""
        del record
        now = time.monotonic()
        if now - self._complained_at >= QUIET_S:
            self._complained_at = now
            sys.stderr.write(f"the log {self._path} cannot be written: {sys.exc_info()[1]}\n")
