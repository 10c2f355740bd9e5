"""Files are flushed before they get their names, and folders after that."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plexrl.process.folders.durable_files import (
    FolderFlush,
    flush,
    make_folders_durably,
    write_durably,
)

WRITER = """
import sys
from pathlib import Path
from plexrl.process.folders.durable_files import make_folders_durably, write_durably
make_folders_durably(Path(sys.argv[1]))
write_durably(Path(sys.argv[1]) / "file", b"one", b"two")
"""


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"one", b"two", mode=0o600)
    assert path.read_bytes() == b"onetwo"
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    (path / "taken").mkdir(parents=True)
    with pytest.raises(OSError, match="irectory"):
        write_durably(path, b"three")
    assert [each.name for each in tmp_path.iterdir()] == ["file"], "nothing is left behind"


def test_a_folder_cannot_be_made_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"irectory|exists"):
        make_folders_durably(tmp_path / "file" / "folder")


def test_the_file_is_flushed_before_its_rename_and_its_folder_after_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    folder = tmp_path / "new" / "folder"
    calls = "fsync,rename,mkdir"
    command = ("strace", "-y", "-o", str(trace), "-e", f"trace={calls}", sys.executable)
    try:
        subprocess.run((*command, "-c", WRITER, str(folder)), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("strace is not installed")
    except subprocess.CalledProcessError as error:
        if b"PTRACE" not in error.stderr:
            raise
        pytest.skip("this process may not trace others")
    found = []
    for line in trace.read_text().splitlines():
        name = line.partition("(")[0]
        if name in calls.split(",") and str(tmp_path) in line:
            # `-y` writes a descriptor as 3</path>.
            path = line.partition("<")[2].partition(">")[0] or line.split('"')[1]
            found.append((name, str(Path(path).relative_to(tmp_path))))
    assert found == [
        ("mkdir", "new"),
        ("fsync", "."),
        ("mkdir", "new/folder"),
        ("fsync", "new"),
        ("fsync", "new/folder/file.part"),
        ("rename", "new/folder/file.part"),
        ("fsync", "new/folder"),
    ]


class Folder:
    """Counts the flushes of a folder; the first one waits for `go`."""

    def __init__(self, path: Path, *, fails: int = 0) -> None:
        self.count = 0
        self.begun, self.go = threading.Event(), threading.Event()
        self._fails = fails
        self.flushes = FolderFlush(path, self._flush)

    def _flush(self, path: Path) -> None:
        self.count += 1
        if self.count == 1:
            self.begun.set()
            assert self.go.wait(60.0)
        if self.count <= self._fails:
            raise OSError("the disk is broken")
        flush(path)


def test_a_flush_that_had_begun_does_not_count_for_a_later_call(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(folder.flushes.flush)
        assert folder.begun.wait(60.0)
        second = pool.submit(folder.flushes.flush)
        folder.go.set()
        first.result(60.0)
        second.result(60.0)
    assert folder.count == 2


def test_calls_that_wait_share_one_flush(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    arrived = threading.Semaphore(0)

    def call() -> None:
        arrived.release()
        folder.flushes.flush()

    with ThreadPoolExecutor(50) as pool:
        first = pool.submit(folder.flushes.flush)
        assert folder.begun.wait(60.0)
        calls = [pool.submit(call) for _ in range(49)]
        for _ in calls:
            assert arrived.acquire(timeout=60.0)
        folder.go.set()
        for each in (first, *calls):
            each.result(60.0)
    # A thread may be late by one flush or another.
    assert folder.count < 10


def test_a_failed_flush_is_the_error_of_its_own_caller_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path, fails=1)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(folder.flushes.flush)
        assert folder.begun.wait(60.0)
        second = pool.submit(folder.flushes.flush)
        folder.go.set()
        with pytest.raises(OSError, match="broken"):
            first.result(60.0)
        second.result(60.0)
