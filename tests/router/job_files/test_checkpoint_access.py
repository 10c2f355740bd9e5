"""A model's path inside the checkpoint folder needs access to the checkpoint's job."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import InvalidRequestError, UnknownJobError
from plexrl.router.job_files.checkpoint_access import CheckpointAccess

CLAIM = {"tenant": "t"}


class OwnJobOnly:
    """A fake scheduler that shows the caller the job `own` alone."""

    async def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert (method, params) == ("get_job", {"job": params["job"], **CLAIM})
        if params["job"] != "own":
            raise UnknownJobError(f"there is no job {params['job']!r}")
        return {}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of two jobs, beside another model."""
    for name in ("checkpoints/own/c", "checkpoints/secret/c", "models/public"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(tmp_path / "checkpoints" / "secret" / "c")
    return tmp_path / "checkpoints"


def check(folder: Path, path: str) -> None:
    access = CheckpointAccess(OwnJobOnly(), str(folder))  # type: ignore[arg-type]
    asyncio.run(access.check_path(path, CLAIM))


@pytest.mark.parametrize("way", ["own/c", "secret/../own/c", "../models/public", "."])
def test_own_checkpoints_and_other_folders_may_be_read(folder: Path, way: str) -> None:
    check(folder, f"{folder}/{way}")


@pytest.mark.parametrize("way", ["secret/c", "secret", "own/../secret/c", "../models/link"])
def test_another_tenants_checkpoint_is_answered_like_an_unknown_job(folder: Path, way: str) -> None:
    with pytest.raises(UnknownJobError):
        check(folder, f"{folder}/{way}")


def test_a_path_that_cannot_be_resolved_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"model\.path"):
        check(folder, "a\0b")


URL = "s3://bucket/checkpoints"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        (f"{URL}/own/c", None),
        (f"{URL}/own/c/", None),
        (f"{URL}/secret/c", UnknownJobError),
        (f"{URL}/own/../secret/c", InvalidRequestError),
        (f"{URL}/own", InvalidRequestError),
        (f"{URL}/.coming/node0", InvalidRequestError),
        (f"{URL}-of-others/own/c", InvalidRequestError),
        ("s3://another-bucket/own/c", InvalidRequestError),
        ("https://example.org/own/c", InvalidRequestError),
    ],
)
def test_nodes_read_own_checkpoints_by_url_and_no_other_urls(
    folder: Path, url: str, error: type[Exception] | None
) -> None:
    access = CheckpointAccess(OwnJobOnly(), URL)  # type: ignore[arg-type]
    if error is None:
        asyncio.run(access.check_path(url, CLAIM))
        return
    with pytest.raises(error):
        asyncio.run(access.check_path(url, CLAIM))
    with pytest.raises(InvalidRequestError):
        check(folder, url)
