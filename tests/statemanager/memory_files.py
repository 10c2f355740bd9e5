"""Pages of memory files, from the kernel's tables of open and mapped files."""

import os
from contextlib import suppress
from pathlib import Path


def memory_file_bytes(name: str, *, pid: int | None = None) -> int:
    """Memory of all memory files whose names begin with `name` and that any process of this
    user (or the one of that id) has open or mapped."""
    return sum(_memory_files(name, pid).values())


class NewSegments:
    """Segments that this process makes, opens or maps from now on. Those of earlier tests do not
    count, because their arenas keep mappings until they are collected."""

    def __init__(self) -> None:
        self._old = _memory_files("plexrl-segment", os.getpid()).keys()

    def nbytes(self) -> int:
        """Their memory."""
        found = _memory_files("plexrl-segment", os.getpid())
        return sum(nbytes for inode, nbytes in found.items() if inode not in self._old)


def _memory_files(name: str, pid: int | None) -> dict[int, int]:
    """Bytes by inode."""
    mark = f"memfd:{name}"
    found: dict[int, int] = {}
    processes = Path("/proc").iterdir() if pid is None else [Path(f"/proc/{pid}")]
    for process in processes:
        # A process may end meanwhile, and other users' tables are not readable.
        with suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == os.getuid():
                found |= _open_files(process, mark)
                found |= _mapped_files(process, mark)
    return found


def _open_files(process: Path, mark: str) -> dict[int, int]:
    found = {}
    for entry in (process / "fd").iterdir():
        with suppress(OSError):
            if mark in str(entry.readlink()):
                there = entry.stat()
                found[there.st_ino] = 512 * there.st_blocks
    return found


def _mapped_files(process: Path, mark: str) -> dict[int, int]:
    """The memory files' mappings have all their pages."""
    found: dict[int, int] = {}
    if mark not in (process / "maps").read_text():
        # The kernel counts every page for the table below.
        return found
    inode = 0
    for line in (process / "smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            inode = int(rest[3]) if mark in line else 0
        elif inode and name == "Rss:":
            found[inode] = max(found.get(inode, 0), int(rest[0]) << 10)
    return found
