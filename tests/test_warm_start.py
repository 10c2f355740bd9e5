"""A process that is forked from one that has loaded its modules is as one that was started anew."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.warm_start import WarmProcess, start_part

MODULE = "plexrl.statemanager"


def start(*words: str, anew: bool) -> subprocess.Popen[Any]:
    return start_part(
        MODULE,
        words,
        # A command that becomes the part's.
        ("env",) if anew else (),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "60"},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="forks are adopted by means of Linux")
@pytest.mark.parametrize(("words", "status"), [(("--help",), 0), (("--unknown",), 2)])
def test_a_fork_says_and_returns_what_a_new_process_does(
    words: tuple[str, ...], status: int
) -> None:
    forked, anew = start(*words, anew=False), start(*words, anew=True)
    assert isinstance(forked, WarmProcess)
    assert psutil.Process(forked.pid).ppid() == os.getpid()
    assert forked.communicate() == anew.communicate()
    assert forked.returncode == anew.returncode == status


@pytest.mark.skipif(sys.platform != "linux", reason="forks are adopted by means of Linux")
def test_a_killed_fork_is_noticed(tmp_path: Path) -> None:
    process = start("--config", str(tmp_path / "missing"), anew=False)
    process.kill()
    process.communicate()
    assert process.returncode == -9
