"""Pages of memory files, from the kernel's tables of open and mapped files.

An emulated driver asks for them at each allocation, and the tables are those of all processes of
the machine. Hence plain system calls: `pathlib` takes twice as long.
"""
# ruff: noqa: PTH115, PTH116, PTH123, PTH208

import os
from collections.abc import Collection
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
    user = os.getuid()
    for process in os.listdir("/proc") if pid is None else [str(pid)]:
        # A process may end meanwhile, and other users' tables are not readable.
        with suppress(OSError):
            if process.isdigit() and os.stat(f"/proc/{process}").st_uid == user:
                found |= _open_files(f"/proc/{process}/fd", mark)
                found |= _mapped_files(f"/proc/{process}", mark, found.keys())
    return found


def _open_files(folder: str, mark: str) -> dict[int, int]:
    found = {}
    for entry in os.listdir(folder):
        path = f"{folder}/{entry}"
        with suppress(OSError):
            if mark in os.readlink(path):
                there = os.stat(path)
                found[there.st_ino] = 512 * there.st_blocks
    return found


def _mapped_files(process: str, mark: str, known: Collection[int]) -> dict[int, int]:
    """Those that are not `known`. The memory files' mappings have all their pages."""
    with open(f"{process}/maps", "rb", buffering=0) as file:
        table = file.read()
    if mark.encode() not in table:
        return {}
    inodes = {int(line.split()[4]) for line in table.decode().splitlines() if mark in line}
    if inodes.issubset(known):
        # The kernel counts every page for the table below.
        return {}
    found: dict[int, int] = {}
    inode = 0
    for line in Path(process, "smaps").read_text().splitlines():
        # The line of a mapping begins with its address, in lower case; names of figures do not.
        if line[0] in "0123456789abcdef":
            inode = int(line.split()[4]) if mark in line else 0
        elif inode and line.startswith("Rss:"):
            found[inode] = max(found.get(inode, 0), int(line.split()[1]) << 10)
    return found
