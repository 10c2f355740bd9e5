"""Samples of a job are kept by step, within bounds."""

from pathlib import Path

import pytest

from plexrl.errors import NotFoundError
from plexrl.router.job_files.record_store import JobKey, RecordFiles, RecordObjects, RecordStore
from plexrl.router.job_files.samples import SampleLog
from plexrl.storage.object_store import ObjectStore
from plexrl.wire.messages.run_views import CHARACTERS_MAX, SAMPLES_MAX, SampleView

JOB = JobKey("t", "j/ob")


@pytest.fixture(params=["files", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RecordStore:
    if request.param == "files":
        return RecordFiles(tmp_path / "records")
    return RecordObjects(ObjectStore(f"memory://{tmp_path.name}"))


def sample(text: str, reward: float | None = 1.0) -> SampleView:
    return {"prompt": "p", "text": text, "reward": reward, "length": 3, "ended_by": "stop"}


def test_samples_are_read_by_step_and_replaced(store: RecordStore) -> None:
    log = SampleLog(store, job_bytes_max=1 << 20)
    assert log.steps(JOB) == []
    log.write(JOB, 7, [sample("former")], 1)
    log.write(JOB, -2, [sample("early", None)], 1)
    log.write(JOB, 7, [sample("later"), sample("other")], 100)
    assert log.steps(JOB) == [-2, 7]
    assert log.steps(JOB._replace(tenant="other")) == []
    found = log.read(JOB, 7)
    assert (found["step"], found["total"]) == (7, 100)
    assert [each["text"] for each in found["samples"]] == ["later", "other"]
    assert log.read(JOB, -2)["samples"][0]["reward"] is None
    with pytest.raises(NotFoundError, match="no samples of step 8"):
        log.read(JOB, 8)


def test_the_oldest_steps_go_beyond_the_bound_and_the_newest_stays(store: RecordStore) -> None:
    log = SampleLog(store, job_bytes_max=2500)
    for step in range(5):
        log.write(JOB, step, [sample("x" * 1000)], 1)
    assert log.steps(JOB) == [3, 4]
    log.write(JOB, 5, [sample("y" * 4000)], 1)
    assert log.steps(JOB) == [5]


def test_long_texts_and_many_samples_are_cut(store: RecordStore) -> None:
    log = SampleLog(store, job_bytes_max=1 << 20)
    log.write(JOB, 1, [sample("z" * 9999)] * 100, 100)
    found = log.read(JOB, 1)["samples"]
    assert len(found) == SAMPLES_MAX
    assert len(found[0]["text"]) == CHARACTERS_MAX
