"""Bytes of memory files, from the kernel's tables of open and mapped files."""

import os
from contextlib import suppress
from pathlib import Path


def memory_file_bytes(name: str, *, pid: int | None = None) -> int:
    """Bytes of all memory files whose names begin with `name` and that any process of this user
    (or the one of that id) has open or mapped."""
    mark = f"memfd:{name}"
    found: dict[int, int] = {}
    processes = Path("/proc").iterdir() if pid is None else [Path(f"/proc/{pid}")]
    for process in processes:
        # A process may end meanwhile, and other users' tables are not readable.
        with suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == os.getuid():
                found |= _open_files(process, mark)
                found |= _mapped_files(process, mark)
    return sum(found.values())


def _open_files(process: Path, mark: str) -> dict[int, int]:
    found = {}
    for entry in (process / "fd").iterdir():
        with suppress(OSError):
            if mark in str(entry.readlink()):
                there = entry.stat()
                found[there.st_ino] = there.st_size
    return found


def _mapped_files(process: Path, mark: str) -> dict[int, int]:
    """The memory files are mapped from their start, possibly several times."""
    found: dict[int, int] = {}
    for line in (process / "maps").read_text().splitlines():
        if mark in line:
            addresses, _, offset, _, inode = line.split()[:5]
            start, end = (int(part, 16) for part in addresses.split("-"))
            reach = int(offset, 16) + end - start
            found[int(inode)] = max(found.get(int(inode), 0), reach)
    return found
