"""What is kept of a job goes some time after the scheduler has forgotten the job."""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import NotFoundError, StorageError
from plexrl.ids import JobId, TenantId
from plexrl.router.job_files.collection import discard_forgotten
from plexrl.router.job_files.metrics_log import MetricsFiles
from plexrl.router.job_files.record_store import JobKey, RecordFiles, RecordObjects, RecordStore
from plexrl.router.job_files.samples import SampleLog
from plexrl.storage.object_store import ObjectStore
from plexrl.wire.messages.cluster_views import CheckpointOwnerView

SAMPLES: list[Any] = [{"prompt": "p", "text": "x", "reward": 1.0, "length": 3, "ended_by": "stop"}]
KNOWN, FORGOTTEN, GONE = JobKey("a/b", "j/1"), JobKey("a/b", "j/2"), JobKey("gone", "j/1")


class Remembered:
    """A scheduler that remembers one job of one tenant."""

    async def call(self, method: str, params: Mapping[str, object]) -> CheckpointOwnerView:
        assert method == "checkpoint_owner"
        if params.get("tenant", KNOWN.tenant) != KNOWN.tenant:
            raise NotFoundError("there is no such tenant")
        if params.get("job", KNOWN.job) != KNOWN.job:
            raise NotFoundError("there is no such job")
        return {
            "tenant": TenantId(KNOWN.tenant),
            "is_operator": False,
            "checkpoints_max": None,
            "checkpoint_bytes_max": None,
            "jobs": [JobId(KNOWN.job)],
        }


@pytest.fixture(params=["files", "objects"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> RecordStore:
    if request.param == "files":
        return RecordFiles(tmp_path)
    return RecordObjects(ObjectStore(f"memory://{tmp_path.name}"))


def collect(records: RecordStore, older_than_s: float = -60.0) -> None:
    asyncio.run(discard_forgotten(records, Remembered(), older_than_s=older_than_s))


def test_samples_and_health_of_forgotten_jobs_go_and_those_of_known_ones_stay(
    records: RecordStore,
) -> None:
    log = SampleLog(records, job_bytes_max=1 << 20)
    for job in (KNOWN, FORGOTTEN, GONE):
        log.write(job, 1, SAMPLES, 1)
        records.write(f"{job.folder('health')}/r1", b"{}")
    collect(records, older_than_s=3600.0)
    assert log.steps(FORGOTTEN) == [1], "a new job of that id may have written it"
    collect(records)
    assert [log.steps(job) for job in (KNOWN, FORGOTTEN, GONE)] == [[1], [], []]
    assert [each.key for each in records.find("health")] == [f"{KNOWN.folder('health')}/r1"]
    log.write(GONE, 2, SAMPLES, 1)
    assert log.steps(GONE) == [2]


def test_metrics_of_forgotten_jobs_go_and_a_new_job_begins_anew(tmp_path: Path) -> None:
    log = MetricsFiles(tmp_path, row_bytes_max=1000, job_bytes_max=10_000)
    for job in (KNOWN, FORGOTTEN):
        for step in range(3):
            log.append(job, step, {})
        log.page(job, 0)
    collect(RecordFiles(tmp_path))
    assert len(json.loads(log.page(KNOWN, 0))["rows"]) == 3
    log.append(FORGOTTEN, 7, {})
    assert [row["step"] for row in json.loads(log.page(FORGOTTEN, 0))["rows"]] == [7]


def test_what_a_killed_router_was_writing_goes_with_its_job(tmp_path: Path) -> None:
    records = RecordFiles(tmp_path)
    records.write(f"{FORGOTTEN.folder('samples')}/1", b"1")
    folder = tmp_path / FORGOTTEN.folder("samples")
    (folder / "2.part").write_bytes(b"2")
    os.utime(folder / "1", (0, 0))
    assert [each.key for each in records.find("samples")] == [f"{FORGOTTEN.folder('samples')}/1"]
    collect(records, older_than_s=60.0)
    assert list((tmp_path / "samples").iterdir()) == []


def test_objects_of_an_earlier_version_stay_while_their_job_is_known(tmp_path: Path) -> None:
    records = RecordObjects(ObjectStore(f"memory://{tmp_path.name}"))
    records.write("metrics/j%2F1/rows/000000000001", b"{}")
    records.write("metrics/j%2F2/rows/000000000001", b"{}")
    collect(records)
    assert [each.key for each in records.find("metrics")] == ["metrics/j%2F1/rows/000000000001"]


def test_a_folder_that_cannot_be_deleted_keeps_no_others(tmp_path: Path) -> None:
    class Stubborn(RecordFiles):
        """Cannot delete the first folder that it should."""

        failed = 0

        def remove(self, folder: str, *, before: float) -> bool:
            self.failed += 1
            if self.failed == 1:
                raise PermissionError(folder)
            return super().remove(folder, before=before)

    records = Stubborn(tmp_path)
    for job in (GONE, FORGOTTEN):
        records.write(f"{job.folder('samples')}/1", b"1")
    collect(records)
    assert len(records.find("samples")) == 1


def test_files_are_listed_while_folders_beside_them_are_removed(tmp_path: Path) -> None:
    records = RecordFiles(tmp_path)
    records.write("samples/t/j/1", b"1")
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            for number in range(20):
                (tmp_path / f"samples/t/{number}/x").mkdir(parents=True, exist_ok=True)
            for number in range(20):
                shutil.rmtree(tmp_path / f"samples/t/{number}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(500):
            assert [each.key for each in records.find("samples")] == ["samples/t/j/1"]
    finally:
        ended.set()
        thread.join()


def test_errors_of_the_disk_have_types(tmp_path: Path) -> None:
    records = RecordFiles(tmp_path)
    refused = "n" * 300
    for use in (records.read, records.find, lambda key: records.delete([key])):
        with pytest.raises(StorageError, match="check its disk"):
            use(refused)
