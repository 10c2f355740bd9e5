"""The checkpoint quota: its bounds, what counts against it, and a disk that cannot be read."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import CheckpointExistsError, QuotaExceededError, StorageError
from plexrl.router.job_files.checkpoint_quota import CheckpointQuota
from plexrl.statemanager.checkpoint.places.choice import root_at

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
