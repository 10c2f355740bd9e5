"""A tenant loads models below its roots and its own checkpoints; all else is unknown to it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from plexrl.access import AccessRole
from plexrl.errors import InvalidRequestError, NotFoundError, UnknownJobError
from plexrl.router.job_files.model_access import ModelAccess
from plexrl.router.services.authentication import Caller

TENANT = Caller("t", AccessRole.MEMBER)
OPERATOR = Caller("operator", AccessRole.OPERATOR)
URL = "s3://bucket/checkpoints"


class OwnJobOnly:
    """A fake scheduler that shows the tenant the job `own` alone, and gives it the root `home`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "model_roots":
            assert params == {"name": "t"}
            return {"model_roots": [f"{self._folder}/home"]}
        assert method == "get_job"
        if params["job"] != "own" and not params.get("as_operator"):
            raise UnknownJobError(f"there is no job {params['job']!r}")
        return {}


def make_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Models in and outside of roots, checkpoints of two jobs, and links that lead astray."""
    for name in (
        *("models/public", "home/own", "private/model", "models-of-others/model"),
        *("checkpoints/own/c", "checkpoints/secret/c"),
        *("home/linked-file", "home/linked-index"),
    ):
        make_model(tmp_path / name)
    (tmp_path / "roots").symlink_to(tmp_path / "models")
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "astray").symlink_to(tmp_path / "private" / "model")
    (tmp_path / "models" / "checkpoint").symlink_to(tmp_path / "checkpoints" / "secret" / "c")
    stolen = tmp_path / "home" / "linked-file" / "model.safetensors"
    stolen.unlink()
    stolen.symlink_to(tmp_path / "private" / "model" / "model.safetensors")
    index = {"weight_map": {"w": "../../private/model/model.safetensors"}}
    (tmp_path / "home/linked-index/model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def check(folder: Path, path: str, caller: Caller = TENANT, checkpoints: str = "") -> None:
    access = ModelAccess(
        OwnJobOnly(folder),  # type: ignore[arg-type]
        checkpoints or f"{folder}/checkpoints",
        (f"{folder}/roots",),
    )
    asyncio.run(access.check(path, caller))


@pytest.mark.parametrize(
    "way",
    [
        *("models/public", "roots/public", "home/own", "home/../models/public"),
        *("checkpoints/own/c", "checkpoints/secret/../own/c"),
    ],
)
def test_models_below_a_root_and_own_checkpoints_may_be_loaded(folder: Path, way: str) -> None:
    check(folder, f"{folder}/{way}")


NOT_THEIRS = [
    *("private/model", "models-of-others/model", "models/astray", "models/../private/model"),
    *("checkpoints/secret/c", "checkpoints/own/../secret/c", "models/checkpoint", "checkpoints"),
    *("home/linked-file", "home/linked-index"),
]
NOT_THERE = [
    *("private/nothing", "models/nothing", "models/empty", "nothing"),
    *("checkpoints/own/nothing", "checkpoints/nothing/c", "models/public/config.json", "a\0b"),
]


@pytest.mark.parametrize("way", [*NOT_THEIRS, *NOT_THERE])
def test_not_there_and_not_theirs_have_one_answer(folder: Path, way: str) -> None:
    path = f"{folder}/{way}"
    with pytest.raises(NotFoundError) as caught:
        check(folder, path)
    answer = str(caught.value).replace(repr(path), "PATH")
    assert type(caught.value) is NotFoundError
    assert caught.value.details == {}
    with pytest.raises(NotFoundError) as other:
        check(folder, f"{folder}/never")
    assert answer == str(other.value).replace(repr(f"{folder}/never"), "PATH")


def test_a_tenants_relative_path_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(NotFoundError):
        check(folder, "models/public")


@pytest.mark.parametrize("way", [*NOT_THEIRS, "private/nothing"])
def test_an_operator_may_load_any_directory(folder: Path, way: str) -> None:
    check(folder, f"{folder}/{way}", OPERATOR)


def test_an_operator_is_told_why_a_path_cannot_be_resolved(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"model\.path"):
        check(folder, "a\0b", OPERATOR)


@pytest.mark.parametrize("url", [f"{URL}/own/c", f"{URL}/own/c/"])
def test_own_checkpoints_may_be_loaded_by_url(folder: Path, url: str) -> None:
    check(folder, url, checkpoints=URL)


@pytest.mark.parametrize(
    "url",
    [
        *(f"{URL}/secret/c", f"{URL}/nothing/c", f"{URL}/own/../secret/c", f"{URL}/own"),
        *(f"{URL}/.coming/node0", f"{URL}-of-others/own/c", "s3://another-bucket/own/c"),
        *("https://example.org/own/c", "gs://x"),
    ],
)
def test_all_other_urls_have_one_answer(folder: Path, url: str) -> None:
    for checkpoints in (URL, f"{folder}/checkpoints"):
        with pytest.raises(NotFoundError, match="there is no model"):
            check(folder, url, checkpoints=checkpoints)


def test_an_operators_url_must_be_a_checkpoint(folder: Path) -> None:
    """Nodes read it with the credentials of the cluster."""
    check(folder, f"{URL}/secret/c", OPERATOR, checkpoints=URL)
    with pytest.raises(InvalidRequestError, match="not a checkpoint of this cluster"):
        check(folder, "https://example.org/own/c", OPERATOR, checkpoints=URL)
