"""Captured calls, in files and in an object store."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.errors import QuotaExceededError
from plexrl.router.job_files import captures
from plexrl.router.job_files.captures import CaptureFiles, CaptureObjects, Captures
from plexrl.storage.object_store import ObjectStore
from tests.moto_server import moto_server
from tests.s3_server import BUCKET


@pytest.fixture(params=["files", "objects"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Captures]:
    if request.param == "files":
        yield CaptureFiles(tmp_path / "captures", job_bytes_max=1000)
        return
    with moto_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects = ObjectStore(f"s3://{BUCKET}/captures-test")
        yield CaptureObjects(objects, job_bytes_max=1000)
        objects.close()


def test_calls_are_kept_by_trajectory_and_a_repeated_one_once(store: Captures) -> None:
    store.add("j", "actor/one", "j:1", b"first")
    store.add("j", "actor/one", "j:2", b"second")
    store.add("j", "actor/one", "j:2", b"second")
    store.add("j", "actor/one-more", "j:3", b"third")
    store.add("other", "actor/one", "o:1", b"fourth")
    assert sorted(store.read("j", "actor/one")) == [b"first", b"second"]
    assert store.read("j", "actor/one-more") == [b"third"]
    assert store.read("j", "actor/none") == []
    store.discard(older_than_s=3600)
    assert len(store.read("j", "actor/one")) == 2
    store.discard(older_than_s=-3600)
    assert store.read("j", "actor/one") == store.read("other", "actor/one") == []


def test_a_trajectory_is_kept_as_a_whole_until_long_after_its_last_call(tmp_path: Path) -> None:
    files = CaptureFiles(tmp_path, job_bytes_max=2000)
    files.add("j", "old", "1", b"1")
    files.add("j", "new", "1", b"1")
    for folder in (tmp_path / "j").iterdir():
        for path in folder.iterdir():
            os.utime(path, (0, 0))
    os.utime(tmp_path / "j/old", (0, 0))
    files.discard(older_than_s=60)
    assert (files.read("j", "old"), files.read("j", "new")) == ([], [b"1"])


def test_a_trajectory_has_a_bounded_number_of_calls(tmp_path: Path) -> None:
    files = CaptureFiles(tmp_path, job_bytes_max=2000)
    files.add("j", "t", "0", b"0")
    for number in range(1, captures.CALLS_MAX):
        (tmp_path / "j/t" / f"{number}.json").write_bytes(b"0")
    with pytest.raises(QuotaExceededError, match="name another one"):
        files.add("j", "t", "one-more", b"0")
    assert len(files.read("j", "t")) == captures.CALLS_MAX
    files.add("j", "t", "0", b"1")
    assert b"1" in files.read("j", "t"), "a repeated call replaces its row"


def test_a_job_has_a_bounded_number_of_bytes(store: Captures) -> None:
    store.add("j", "actor/one", "j:1", b"0" * 600)
    store.check("j", "actor/two", "j:2")
    store.add("j", "actor/two", "j:2", b"0" * 600)
    with pytest.raises(QuotaExceededError, match="captures_job_bytes_max"):
        store.check("j", "actor/three", "j:3")
    with pytest.raises(QuotaExceededError, match="captures_job_bytes_max"):
        store.add("j", "actor/three", "j:3", b"0")
    store.add("j", "actor/two", "j:2", b"0" * 600)
    store.add("other", "actor/one", "o:1", b"0")
