"""What routers see of a run is kept beside each other, and harms no request."""

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plexrl.router.job_files.record_store import JobKey, RecordFiles
from plexrl.router.observe import run_watch
from plexrl.router.observe.run_watch import UNWATCHED, RunWatch

JOB = JobKey("t", "a")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


def watch(folder: Path, threads: ThreadPoolExecutor, router: str = "r0") -> RunWatch:
    return RunWatch(RecordFiles(folder), router, lambda *_: None, threads)


def view(watched: RunWatch) -> Any:
    return asyncio.run(watched.view(JOB))


def test_a_damaged_record_of_another_router_fails_no_request(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    RecordFiles(tmp_path).write(f"{JOB.folder('health')}/r1", b"{")
    assert view(watch(tmp_path, threads)) == UNWATCHED


def test_many_writers_leave_a_whole_record_with_the_newest_warnings(
    tmp_path: Path, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch(tmp_path, threads)
    with caplog.at_level(logging.ERROR):
        for _ in range(30):
            # The warning comes and goes.
            watched.rewarded(JOB, total=64, failed=64)
            watched.rewarded(JOB, total=6400, failed=0)
        threads.shutdown()
    assert caplog.records == []
    with ThreadPoolExecutor(1) as others:
        assert view(watch(tmp_path, others, "r1"))["figures"].keys() == {"failed_rewards"}


def test_what_another_router_saw_long_ago_counts_no_more(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(tmp_path, threads).rewarded(JOB, total=64, failed=64)
    threads.shutdown()
    with ThreadPoolExecutor(1) as others:
        assert view(watch(tmp_path, others, "r1"))["warnings"] != []
        monkeypatch.setattr(run_watch, "OTHERS_S", -1.0)
        assert view(watch(tmp_path, others, "r1"))["warnings"] == []
