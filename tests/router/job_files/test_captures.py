"""Captured calls, in files and in an object store."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl.errors import QuotaExceededError
from plexrl.router.http.openai.generation import repeated_operation
from plexrl.router.job_files import captures
from plexrl.router.job_files.captures import Captures
from plexrl.router.job_files.record_store import JobKey, RecordFiles, RecordObjects, RecordStore
from plexrl.storage.object_store import ObjectStore, StoredObject
from tests.moto_server import moto_server
from tests.s3_server import BUCKET

JOB = JobKey("t", "j")
OTHERS = (JobKey("t", "other"), JobKey("u", "j"))


@pytest.fixture(params=["files", "objects"])
def records(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RecordStore]:
    if request.param == "files":
        yield RecordFiles(tmp_path)
        return
    with moto_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects = ObjectStore(f"s3://{BUCKET}/captures-test")
        yield RecordObjects(objects)
        objects.close()


@pytest.fixture
def store(records: RecordStore) -> Captures:
    return Captures(records, job_bytes_max=1000)


def test_calls_are_kept_by_job_and_trajectory_and_a_repeated_one_once(store: Captures) -> None:
    store.add(JOB, "actor/one", "j:1", b"first")
    store.add(JOB, "actor/one", "j:2", b"second")
    store.add(JOB, "actor/one", "j:2", b"second")
    store.add(JOB, "actor/one-more", "j:3", b"third")
    for other in OTHERS:
        store.add(other, "actor/one", "o:1", b"fourth")
    assert sorted(store.read(JOB, "actor/one")) == [b"first", b"second"]
    assert store.read(JOB, "actor/one-more") == [b"third"]
    assert store.read(JOB, "actor/none") == []
    store.discard(older_than_s=3600)
    assert len(store.read(JOB, "actor/one")) == 2
    store.discard(older_than_s=-3600)
    assert [store.read(job, "actor/one") for job in (JOB, *OTHERS)] == [[], [], []]


def test_a_trajectory_is_kept_as_a_whole_until_long_after_its_last_call(tmp_path: Path) -> None:
    store = Captures(RecordFiles(tmp_path), job_bytes_max=2000)
    for call in "12":
        store.add(JOB, "old", call, b"1")
        store.add(JOB, "new", call, b"1")
    folder = tmp_path / "captures/t/j"
    for path in (*folder.glob("old/*"), folder / "new/1.json"):
        os.utime(path, (0, 0))
    store.discard(older_than_s=60)
    assert (store.read(JOB, "old"), store.read(JOB, "new")) == ([], [b"1", b"1"])
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_a_call_that_comes_while_old_trajectories_are_deleted_keeps_its_trajectory(
    records: RecordStore,
) -> None:
    old, later = Captures(records, job_bytes_max=2000), b"later"
    old.add(JOB, "actor/one", "j:1", b"first")

    class Slow(type(records)):  # type: ignore[misc]  # either class
        """Gets a call of each listed trajectory after the listing."""

        def __init__(self) -> None:
            self.__dict__.update(records.__dict__)

        def find(self, folder: str) -> list[StoredObject]:
            found: list[StoredObject] = super().find(folder)
            if folder == captures.FOLDER:
                old.add(JOB, "actor/one", "j:2", later)
                found = [replace(each, modified_s=0.0) for each in found]
            return found

    Captures(Slow(), job_bytes_max=2000).discard(older_than_s=3600)
    assert sorted(old.read(JOB, "actor/one")) == [b"first", later]


def test_a_trajectory_has_a_bounded_number_of_calls(tmp_path: Path) -> None:
    store = Captures(RecordFiles(tmp_path), job_bytes_max=2000)
    store.add(JOB, "t", "0", b"0")
    for number in range(1, captures.CALLS_MAX - 1):
        (tmp_path / "captures/t/j/t" / f"{number}.json").write_bytes(b"0")
    store.check(JOB, "t", "one-more")
    store.add(JOB, "t", "one-more", b"0")
    with pytest.raises(QuotaExceededError, match="name another one"):
        store.check(JOB, "t", "two-more")
    store.check(JOB, "t", "0")


def test_a_job_has_a_bounded_number_of_bytes(store: Captures) -> None:
    store.add(JOB, "actor/one", "j:1", b"0" * 600)
    store.check(JOB, "actor/two", "j:2")
    store.add(JOB, "actor/two", "j:2", b"0" * 400)
    with pytest.raises(QuotaExceededError, match="captures_job_bytes_max"):
        store.check(JOB, "actor/three", "j:3")
    store.check(JOB, "actor/two", "j:2")
    for other in OTHERS:
        store.check(other, "actor/three", "o:1")


def test_calls_of_a_job_are_kept_whatever_its_id_is(tmp_path: Path) -> None:
    store = Captures(RecordFiles(tmp_path), job_bytes_max=2000)
    job = JobKey("t", f"a{':' * 199}")
    call = repeated_operation(job.job, "actor", "key")
    store.check(job, f"{'d' * 100}/{'t' * 100}", call)
    store.add(job, f"{'d' * 100}/{'t' * 100}", call, b"1")
    assert store.read(job, f"{'d' * 100}/{'t' * 100}") == [b"1"]
