"""Runs on the disk: several routers write, and any of them may be killed."""

import errno
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plexrl.errors import ConflictError, NotFoundError, StorageFullError
from plexrl.runs import records as module
from plexrl.runs.records import LOG_TAIL_BYTES, RECORDS_MAX, RunRecords, RunSpec, RunState


def spec(number: int) -> RunSpec:
    files = {"a.py": b"1"}
    return RunSpec(run=f"run-{number}", tenant="lab", script="a.py", files=files, created_at=number)


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    return RunRecords(tmp_path / "runs")


def test_many_stop_a_run_at_once(records: RunRecords) -> None:
    records.add(spec(1), live_max=1)
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda _: records.stop("run-1"), range(200)))
    assert records.shall_stop("run-1")


def test_runs_that_begin_at_once_keep_to_the_bound(records: RunRecords) -> None:
    def add(number: int) -> bool:
        try:
            records.add(spec(number), live_max=3)
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(add, range(48))) == 3


def test_a_run_that_was_half_deleted_does_not_begin_anew(
    records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(RECORDS_MAX):
        records.add(spec(number), live_max=1)
        records.write_state(f"run-{number}", RunState(state="completed"))

    def killed(folder: Path) -> None:
        (folder / "state.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        records.add(spec(RECORDS_MAX), live_max=1)
    assert {records.state(run).state for run in records.names()} == {"completed"}


def test_a_full_disk_refuses_a_run_and_keeps_nothing_of_it(
    records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(module, "write_durably", full)
    with pytest.raises(StorageFullError):
        records.add(spec(1), live_max=1)
    assert [each.name for each in records.folder.iterdir()] == ["lock"]


def test_an_id_with_a_zero_byte_is_no_run(records: RunRecords) -> None:
    with pytest.raises(NotFoundError):
        records.view("\0")


def test_of_an_ended_run_s_log_the_end_is_kept(records: RunRecords) -> None:
    records.add(spec(1), live_max=1)
    records.cut_log("run-1")
    records.log_path("run-1").write_bytes(b"first\n" + b"x" * (2 * LOG_TAIL_BYTES) + b"\nlast")
    before = records.log("run-1", 100)
    records.cut_log("run-1")
    assert records.log("run-1", 100) == before
    assert records.log_path("run-1").stat().st_size == LOG_TAIL_BYTES
