"""The logs of processes that append to their standard error are bounded while they write on."""

import subprocess
import sys
from pathlib import Path

from plexrl.process.folders.rotated_log import bound_logs

WRITE = """
import sys
for line in sys.stdin:
    sys.stderr.write(line)
    sys.stderr.flush()
    print(1, flush=True)
"""


def test_a_log_is_cut_and_its_process_writes_on(tmp_path: Path) -> None:
    path = tmp_path / "node0" / "job" / "actor-0.log"
    path.parent.mkdir(parents=True)
    with path.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    for number in range(100):
        process.stdin.write(f"line {number} {'x' * 90}\n")
        process.stdin.flush()
        process.stdout.readline()
        bound_logs(tmp_path, 2000)
        assert sum(file.stat().st_size for file in path.parent.iterdir()) <= 2000 + 200
    process.communicate()
    former = path.with_name("actor-0.log.1")
    assert "line 99" in former.read_text() + path.read_text()
    assert sorted(path.parent.iterdir()) == [path, former]


def test_a_short_log_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    path.write_text("short\n")
    bound_logs(tmp_path, 2000)
    assert path.read_text() == "short\n"
    assert list(tmp_path.iterdir()) == [path]
