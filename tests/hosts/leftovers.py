"""The folder of one network of simulated hosts, and the removal of those that killed runs left.

A network holds an exclusive lock (`flock`) on the file `lock` of its folder. The kernel releases
the lock when the process ends, however it ends.
"""

import fcntl
import os
import shutil
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from tests.hosts.loop_disk import unmount_all

PREFIX = "plexrl-hosts-"
LOCK = "lock"


def make_folder() -> tuple[Path, IO[str]]:
    """A new folder and its lock, which is held until the file is closed."""
    remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    # A host's database server has another user than root.
    folder.chmod(0o711)
    lock = (folder / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def record(folder: Path, name: str, pid: int) -> None:
    """Note the first process of a host, with the namespace that it has."""
    (folder / f"{name}.pid").write_text(f"{pid} {_namespace(pid)}")


def remove_leftovers() -> None:
    """End the hosts of killed runs, and remove their folders."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = (folder / LOCK).open()
        except OSError:
            continue
        with lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)


def remove(folder: Path) -> None:
    """End the processes that are noted in a network's folder, and remove it."""
    for path in folder.glob("*.pid"):
        words = path.read_text().split()
        # The kernel may have given the process id to another process, never the namespace as well.
        if len(words) == 2 and _namespace(int(words[0])) == words[1]:
            with suppress(ProcessLookupError):
                os.kill(int(words[0]), signal.SIGKILL)
    unmount_all(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""
