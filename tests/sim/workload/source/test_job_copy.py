"""A copy of the jobs gives the same jobs and results."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl.errors import CapacityError, InvalidRequestError
from plexrl.sim.search.one_run import FailedRun
from plexrl.sim.search.sweep import run_all
from plexrl.sim.workload.source.job_copy import BATCH_JOBS, JobCopy, copy_jobs
from plexrl.sim.workload.source.trace_source import PublishedSource
from plexrl.traces import TraceJob
from tests.sim.search.test_sweep import BASE, documents


def test_a_copy_has_the_very_jobs(tmp_path: Path) -> None:
    source = PublishedSource(span_s=30 * 86_400.0, jobs_per_day=20.0)
    jobs = list(copy_jobs(source.jobs(), tmp_path / "jobs"))
    assert jobs == list(source.jobs())
    assert len(jobs) > 2 * BATCH_JOBS
    copy = JobCopy(path=str(tmp_path / "jobs"))
    assert list(copy.jobs()) == list(copy.jobs()) == jobs
    assert {type(job.submit_s) for job in copy.jobs()} == {float}


def test_an_error_on_the_way_is_the_source_s_own(tmp_path: Path) -> None:
    def jobs() -> Iterator[TraceJob]:
        yield from PublishedSource(span_s=86_400.0).jobs()
        raise CapacityError("no more")

    with pytest.raises(CapacityError):
        list(copy_jobs(jobs(), tmp_path / "jobs"))


def test_a_full_disk_is_told() -> None:
    jobs = PublishedSource(span_s=86_400.0).jobs()
    with pytest.raises(InvalidRequestError, match="No space left on device"):
        list(copy_jobs(jobs, Path("/dev/full")))


@pytest.mark.parametrize("workers", [1, 2])
def test_runs_that_read_a_copy_have_the_same_results(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "jobs"
    for _ in copy_jobs(BASE.source.jobs(), path):
        pass
    copies = {BASE.source: JobCopy(path=str(path))}
    scenarios = [BASE, replace(BASE, policy="isolated"), replace(BASE, policy="none such")]
    ended: list[object] = []
    found = run_all(
        scenarios,
        workers=workers,
        copies=copies,
        on_end=lambda _, outcome: ended.append(outcome),
    )
    assert documents(found[:2]) == documents(run_all(scenarios[:2], workers=1))
    assert isinstance(found[2], FailedRun)
    assert found[2].scenario == scenarios[2]
    assert found[2] in ended
    path.unlink()
    (missing,) = run_all(scenarios[:1], workers=1, copies=copies)
    assert isinstance(missing, FailedRun)
