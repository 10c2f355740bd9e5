"""Uploads over real file systems of fsspec, one of which fails now and then."""

import itertools
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.checkpoint.requests import UploadState
from plexrl.statemanager.checkpoint.upload import Uploads, upload
from tests.statemanager.conftest import wait_until


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A memory file system whose every third write to a shard fails, and all while `is_down`."""

    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012  # fsspec's own way of sharing the contents
    pseudo_dirs = [""]  # noqa: RUF012
    counter = itertools.count(1)
    is_down = False
    written: list[str] = []  # noqa: RUF012

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if "w" in mode:
            if self.is_down or (".safetensors" in path and next(type(self).counter) % 3 == 0):
                raise OSError("the network is gone")
            self.written.append(path)
        return super().open(path, mode, **kwargs)


@pytest.fixture(autouse=True)
def _flaky() -> None:
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.store.clear()
    FlakyFileSystem.pseudo_dirs[:] = [""]
    FlakyFileSystem.written.clear()
    FlakyFileSystem.counter = itertools.count(1)
    FlakyFileSystem.is_down = False
    FlakyFileSystem.clear_instance_cache()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "job" / "one"
    (path / "training").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    for index in range(5):
        (path / "training" / f"{index}.safetensors").write_bytes(bytes([index]) * 1000)
    return path


def remote(filesystem: Any, root: str) -> dict[str, bytes]:
    return {
        str(path).removeprefix(f"{root}/job/one/"): filesystem.cat_file(path)
        for path in filesystem.find(f"{root}/job/one")
    }


def local(checkpoint: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_everything_arrives_and_is_not_sent_twice(
    checkpoint: Path, tmp_path: Path, protocol: str
) -> None:
    filesystem, root = fsspec.core.url_to_fs(f"{protocol}://{tmp_path}/remote")
    assert upload(filesystem, root, checkpoint) == 5002
    arrived = remote(filesystem, root)
    assert arrived.pop("upload.json")
    assert arrived == local(checkpoint)
    assert upload(filesystem, root, checkpoint) == 0
    (checkpoint / "training" / "0.safetensors").write_bytes(b"another checkpoint of that name")
    assert upload(filesystem, root, checkpoint) == 31
    assert remote(filesystem, root)["training/0.safetensors"] == b"another checkpoint of that name"


def test_a_cut_upload_goes_on_and_has_no_manifest_meanwhile(checkpoint: Path) -> None:
    filesystem, root = fsspec.core.url_to_fs("flaky://remote")
    attempts = 0
    while attempts < 10:
        attempts += 1
        try:
            upload(filesystem, root, checkpoint)
            break
        except OSError:
            assert not filesystem.exists(f"{root}/job/one/upload.json")
    assert attempts == 3
    shards = [path for path in FlakyFileSystem.written if path.endswith(".safetensors")]
    assert len(shards) == len(set(shards)) == 5
    assert {**local(checkpoint), "upload.json": b""}.keys() == remote(filesystem, root).keys()


def test_a_failing_upload_is_tried_again_and_then_reported(checkpoint: Path) -> None:
    uploads = Uploads("flaky://remote", backoff_s=0.001, attempts_max=4)
    uploads.add(checkpoint)
    wait_until(lambda: uploads.state(checkpoint)[0] == UploadState.DONE)
    sent = len(FlakyFileSystem.written)
    uploads.add(checkpoint)
    assert uploads.state(checkpoint) == (UploadState.DONE, None)
    assert len(FlakyFileSystem.written) == sent
    FlakyFileSystem.is_down = True
    (checkpoint / "upload.json").unlink()
    (checkpoint / "config.json").write_text('{"changed": 1}')
    uploads.add(checkpoint)
    wait_until(lambda: uploads.state(checkpoint)[0] == UploadState.FAILED)
    assert "the network is gone" in str(uploads.state(checkpoint)[1])
    assert uploads.pending(checkpoint.parent) == frozenset()
    uploads.close()


def test_a_close_does_not_wait_for_an_upload(checkpoint: Path) -> None:
    FlakyFileSystem.is_down = True
    uploads = Uploads("flaky://remote", backoff_s=1000.0)
    uploads.add(checkpoint)
    assert uploads.pending(checkpoint.parent) == {"one"}
    uploads.close()
    assert uploads.state(checkpoint) == (UploadState.WAITING, None)


def test_an_unknown_protocol_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidRequestError, match="nowhere"):
        Uploads("nowhere://bucket")
