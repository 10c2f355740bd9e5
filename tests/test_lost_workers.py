"""The run of the suite ends, whatever its tests do to their processes."""

import os
import subprocess
import sys
from pathlib import Path

from tests.lost_workers import mix

FILES = {
    "conftest": "from tests.lost_workers import pytest_runtest_setup, pytest_xdist_make_scheduler",
    "test_dies": """
        import os, signal
        def test_before(): pass
        def test_dies(): os.kill(os.getpid(), signal.SIGSEGV)
        def test_after(): pass
    """,
    # It holds the interpreter's lock and sees no signal.
    "test_hangs": """
        from itertools import repeat
        def test_hangs(): sum(repeat(0))
        def test_after(): pass
    """,
    "test_has_longer": """
        import time, pytest
        @pytest.mark.timeout(60)
        def test_has_longer(): time.sleep(7)
    """,
    "test_waits": """
        import threading
        def test_waits(): threading.Event().wait()
        def test_after(): pass
    """,
}


def test_what_kills_or_blocks_a_process_fails_alone_and_the_run_ends(tmp_path: Path) -> None:
    for name, text in FILES.items():
        lines = [line.removeprefix("        ") for line in text.strip().splitlines()]
        (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n")
    root = Path(__file__).parents[1]
    options = ["-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "-q", "-rA"]
    options += ["-o", "timeout=3", "-o", "faulthandler_timeout=6"]
    options += ["-c", f"{root}/pyproject.toml", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    words = [line.split() for line in done.stdout.splitlines()]
    failed = sorted(line[1] for line in words if line[:1] == ["FAILED"])
    assert failed == [
        "test_dies.py::test_dies",
        "test_hangs.py::test_hangs",
        "test_waits.py::test_waits",
    ], done.stdout
    assert "3 failed, 5 passed" in done.stdout.splitlines()[-1], done.stdout
    assert done.returncode == 1


def test_files_that_wait_run_beside_files_that_compute_and_the_last_ones_are_short() -> None:
    waiting = [
        f"tests/{folder}/{number}.py" for folder in ("worker", "cluster") for number in "123"
    ]
    computing = [f"tests/scheduler/{number}.py" for number in range(12)]
    mixed = mix([*computing, *waiting, *computing])
    assert sorted(mixed) == sorted(waiting + computing)
    assert [file for file in mixed if file in waiting] == [*waiting[3:], *waiting[:3]]
    assert [file for file in mixed if file in computing] == computing
    for begin in range(0, 15, 3):
        assert set(mixed[begin : begin + 3]) & set(waiting)
        assert set(mixed[begin : begin + 3]) & set(computing)
    assert not set(mixed[-3:]) & set(waiting)
