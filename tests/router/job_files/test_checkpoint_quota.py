"""The checkpoint quota: its bounds, what counts against it, and a disk that cannot be read."""

import asyncio
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from plexrl.errors import CheckpointExistsError, QuotaExceededError, StorageError
from plexrl.router.job_files.checkpoint_quota import CheckpointQuota
from plexrl.statemanager.checkpoint.format.record import (
    RECORD,
    VERSION,
    CheckpointRecord,
    encode_record,
)
from plexrl.statemanager.checkpoint.places.choice import root_at
from plexrl.statemanager.checkpoint.write.publish import publish

BYTES = 100
"""Size of each checkpoint."""


class Owner:
    """A fake scheduler whose tenant has the jobs `j` and `k`."""

    def __init__(self, **changes: object) -> None:
        bounds = {"checkpoints_max": None, "checkpoint_bytes_max": None}
        self._owner = {"is_operator": False, "tenant": "t", "jobs": ["j", "k"], **bounds, **changes}

    async def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert (method, params) == ("checkpoint_owner", {"job": "j"})
        return self._owner


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "weights").write_bytes(bytes(BYTES))


def is_refused(folder: Path, owner: Owner, name: str = "new", **bounds: int | None) -> bool:
    """Whether job `j` may not save checkpoint `name`."""
    given: dict[str, Any] = {"checkpoints_max": 3, "bytes_max": None, **bounds}
    quota = CheckpointQuota(owner, root_at(folder), "r", **given)  # type: ignore[arg-type]
    try:
        asyncio.run(quota.check("j", name))
    except QuotaExceededError:
        return True
    return False


def test_a_tenant_at_its_bound_saves_no_further_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, "j/one", "k/two", "stranger/one", "stranger/two")
    assert not is_refused(tmp_path, Owner())
    # One that is being written counts too.
    make(tmp_path, "k/.three.node0.part")
    assert is_refused(tmp_path, Owner())
    assert not is_refused(tmp_path, Owner(), "one"), "it replaces its own"
    assert not is_refused(tmp_path, Owner(checkpoints_max=4))
    assert not is_refused(tmp_path, Owner(is_operator=True))


def test_bytes_that_forks_share_count_once(tmp_path: Path) -> None:
    make(tmp_path, "j/one")
    assert root_at(tmp_path).use(["j", "k"], None) == (1, BYTES)
    root_at(tmp_path).place("j", "one").share("k", "base", "r")
    assert root_at(tmp_path).use(["j", "k"], None) == (2, BYTES)
    make(tmp_path, "k/two")
    assert root_at(tmp_path).use(["j", "k"], None) == (3, 2 * BYTES)
    root_at(tmp_path).place("j", "one").delete("r")
    assert root_at(tmp_path).use(["j", "k"], None) == (2, 2 * BYTES)
    with pytest.raises(CheckpointExistsError):
        root_at(tmp_path).place("k", "two").share("k", "base", "r")


def test_a_checkpoint_that_is_replaced_meanwhile_is_shared_in_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions(tmp_path)
    link = os.link
    at_first = iter([lambda: publish(tmp_path / "new", tmp_path / "j/one", "n", overwrite=True)])

    def linking(source: str, target: str, **options: bool) -> None:
        link(source, target, **options)
        next(at_first, lambda: None)()

    monkeypatch.setattr(os, "link", linking)
    root_at(tmp_path).place("j", "one").share("k", "base", "r")
    assert contents(tmp_path / "k/base") == {"a": "new", "b": "new"}


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions(tmp_path)
    link, place = os.link, root_at(tmp_path).place("j", "one")
    at_first = iter([lambda: place.delete("n")])

    def linking(source: str, target: str, **options: bool) -> None:
        link(source, target, **options)
        next(at_first, lambda: None)()

    monkeypatch.setattr(os, "link", linking)
    with pytest.raises(FileNotFoundError):
        place.share("k", "base", "r")
    assert list((tmp_path / "k").iterdir()) == []


def make_versions(folder: Path) -> None:
    """Checkpoint j/one, and what replaces it."""
    for name, version in (("j/one", "old"), ("new", "new")):
        (folder / name).mkdir(parents=True)
        for file in ("a", "b"):
            (folder / name / file).write_text(version)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_repeated_share_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_versions(tmp_path)
    place = root_at(tmp_path).place("j", "one")
    place_record(tmp_path / "j/one")
    quota = CheckpointQuota(Owner(), root_at(tmp_path), "r", checkpoints_max=9, bytes_max=None)  # type: ignore[arg-type]
    link, repeated = os.link, Thread(target=lambda: asyncio.run(share(quota)))
    at_first = iter([repeated.start])

    def linking(source: str, target: str, **options: bool) -> None:
        link(source, target, **options)
        for begin in at_first:
            begin()
            # The first one is slow; the repeated one must not empty its folder.
            repeated.join(0.3)

    monkeypatch.setattr(os, "link", linking)
    asyncio.run(share(quota))
    repeated.join(10.0)
    assert contents(tmp_path / "j/base") == contents(tmp_path / "j/one")
    assert place.read_record() == root_at(tmp_path).place("j", "base").read_record()


async def share(quota: CheckpointQuota) -> None:
    await quota.share("j", "one", "j", "base")


def place_record(folder: Path) -> None:
    record = CheckpointRecord(
        version=VERSION,
        deployment="j/actor",
        seq=1,
        world_size=1,
        stamps=("stamp",),
        format="own",
        model_dtype=None,
        meta_json=("{}",),
        block_bytes=1,
        files=(),
        tensors=(),
        step=1,
        keep=False,
        asked_by="",
        node="n",
    )
    (folder / RECORD).write_bytes(encode_record(record))


@pytest.mark.parametrize("bytes_max", [2 * BYTES, 2 * BYTES + 1])
def test_a_tenant_is_bounded_by_bytes(tmp_path: Path, bytes_max: int) -> None:
    make(tmp_path, "j/one", "k/two")
    assert is_refused(tmp_path, Owner(), bytes_max=bytes_max) == (bytes_max == 2 * BYTES)
    own = Owner(checkpoint_bytes_max=bytes_max)
    assert is_refused(tmp_path, own, bytes_max=1) == (bytes_max == 2 * BYTES)


def test_an_unreadable_disk_refuses_a_checkpoint_with_a_typed_error(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("no folder")
    quota = CheckpointQuota(Owner(), root_at(folder), "r", checkpoints_max=1, bytes_max=None)  # type: ignore[arg-type]
    # A typed error: after any other error the executor assumes that the workers' state changed.
    with pytest.raises(StorageError, match="cannot be read"):
        asyncio.run(quota.check("j", '{"name": "c"}'))
