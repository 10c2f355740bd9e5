"""Memory does not grow with a trace's length, even for sorting."""

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.traces import JOBS, TraceJob, describe_jobs, write_jobs
from plexrl.traces.formats.sorting import by_submission
from plexrl.traces.io.files import checked, rows
from plexrl.traces.io.json_list import json_elements
from plexrl.traces.io.problems import Problems
from tests.examples import examples

ONE = TraceJob(job_id="a", submit_s=0.0, gpus=1, duration_s=5.0)


def endless(count: int) -> Iterator[TraceJob]:
    for at in range(count):
        yield replace(ONE, job_id=f"job-{at}", submit_s=float(at))


def peak_bytes(path: Path, count: int) -> int:
    """Of reading and describing so many jobs."""
    write_jobs(path, endless(count))
    tracemalloc.start()
    try:
        # Keys go to a file early, so that a short trace shows what a long one does.
        describe_jobs(rows(path, JOBS, Problems(), keys_in_memory=200))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_flat_in_the_length_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    peak_bytes(path, 100)
    short, long = peak_bytes(path, 600), peak_bytes(path, 6000)
    assert long < 1.1 * short + 20_000


def test_memory_is_flat_in_the_length_of_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "list.json"

    def peak_of(count: int) -> int:
        path.write_text(json.dumps([{"text": "x" * 10_000}] * count))
        tracemalloc.start()
        try:
            assert sum(1 for _ in json_elements(path, Problems())) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak_of(3000) < 1.2 * peak_of(600) + 100_000


@settings(max_examples=examples(40))
@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, 7))
def test_a_trace_is_sorted_in_parts_as_at_once(submits: list[int], in_memory: int) -> None:
    jobs = [
        replace(ONE, job_id=str(at), submit_s=float(submit)) for at, submit in enumerate(submits)
    ]
    start_s = min(submits, default=0)
    wanted = [
        replace(job, submit_s=job.submit_s - start_s)
        for job in sorted(jobs, key=lambda job: job.submit_s)
    ]
    assert list(by_submission(jobs, in_memory)) == wanted


def test_an_abandoned_read_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        jobs = [replace(ONE, job_id=str(at), submit_s=Random(at).random()) for at in range(9)]
        partly = by_submission(jobs, 2)
        next(partly)
        assert list(Path(folder).iterdir())
        partly.close()  # type: ignore[attr-defined]  # it is a generator
        values = ({name: getattr(job, name) for name in JOBS.names} for job in jobs)
        rest = checked(((at, row, []) for at, row in enumerate(values)), JOBS, Problems())
        next(rest)
        rest.close()  # type: ignore[attr-defined]  # it is a generator
        assert not list(Path(folder).iterdir())
