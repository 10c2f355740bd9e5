"""A disk of a few MiB that a test fills: a memory file system of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Leave no room."""
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"\0" * size)
                except OSError:
                    continue

    def make_read_only(self) -> None:
        """Refuse writes, as a disk does after errors; no file may be open for writing."""
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)

    def make_writable(self) -> None:
        """Take writes again."""
        subprocess.run(["mount", "-o", "remount,rw", str(self.path)], check=True)

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of `size` (as `4m`) at a new folder; skips the test where nobody may mount one."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    folder.mkdir()
    options = f"size={size},mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.decode()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
