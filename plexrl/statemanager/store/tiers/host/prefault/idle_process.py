"""Allocates pages of files by a process of idle priority."""

import errno
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).with_name("allocate_pages.py")


class IdleProcess:
    """The process, started on first use. One thread allocates; `end` may be called by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._talking = threading.Lock()
        """Held while the pipes are in use."""
        self._process: subprocess.Popen[str] | None = None

    def allocate(self, path: Path, offset: int, nbytes: int) -> None:
        """Allocate pages for a range of a file; returns when it has them.

        Raises:
            OSError: the file system is full; with `ECANCELED`: `end` was called meanwhile.
        """
        with self._talking:
            with self._lock:
                if self._process is None:
                    self._process = _started()
                process = self._process
            answer = _answer(process, json.dumps([str(path), offset, nbytes]))
        if not answer:
            self.end()
            raise OSError(errno.ECANCELED, "the allocation of pages was ended")
        if code := int(answer):
            raise OSError(code, os.strerror(code))

    def end(self) -> None:
        """End the process, and an allocation that is under way. The next one starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with self._talking:
                process.communicate()


def _answer(process: "subprocess.Popen[str]", request: str) -> str:
    """The answer to a request; empty: the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(f"{request}\n")
        process.stdin.flush()
    return process.stdout.readline()


def _started() -> "subprocess.Popen[str]":
    # Isolated and without site packages: it needs none, and starts at once.
    command = [sys.executable, "-I", "-S", str(SCRIPT)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
