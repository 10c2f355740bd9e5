"""No other local user can own, enter or replace the folders that a cluster uses."""

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.errors import PermissionDeniedError, StorageError
from plexrl.process.folders.folders import TEMPORARY, Folders
from plexrl.process.folders.private_folder import make_private_folder, remove_private_folder
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.tier import Tier

OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: all users write to it, and it has the sticky bit."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def made_by_other_user(folder: Path, permissions: str = "755") -> None:
    subprocess.run(
        ["/bin/mkdir", "-m", permissions, str(folder)],
        user=OTHER_USER,
        group=OTHER_USER,
        extra_groups=[],
        check=True,
        cwd="/",
    )


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_new_folder_is_closed_to_others(shared: Path) -> None:
    make_private_folder(shared / "new")
    assert mode(shared / "new") == 0o700
    make_private_folder(shared / "new")


def test_a_folder_of_ours_that_others_can_read_is_closed_with_a_line_in_the_log(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(0o755)
    with caplog.at_level(logging.WARNING):
        make_private_folder(shared / "open")
    assert mode(shared / "open") == 0o700
    assert "0755" in caplog.text


@as_root
@pytest.mark.parametrize("permissions", ["700", "777"])
def test_a_folder_that_another_user_made_first_is_refused_and_left_alone(
    shared: Path, permissions: str
) -> None:
    taken = shared / "taken"
    made_by_other_user(taken, permissions)
    with pytest.raises(PermissionDeniedError, match=f"belongs to user {OTHER_USER}"):
        make_private_folder(taken)
    remove_private_folder(taken)
    assert taken.exists()


def test_a_symbolic_link_is_refused_and_its_target_left_alone(shared: Path) -> None:
    target = shared / "target"
    target.mkdir(mode=0o700)
    (target / "precious").touch()
    (shared / "link").symlink_to(target)
    with pytest.raises(PermissionDeniedError, match="symbolic link"):
        make_private_folder(shared / "link")
    remove_private_folder(shared / "link")
    assert (target / "precious").exists()


def test_a_folder_that_any_user_can_replace_is_refused(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(PermissionDeniedError, match="any user can replace"):
        make_private_folder(shared / "new")


def test_a_folder_that_cannot_be_made_is_a_typed_error() -> None:
    with pytest.raises(StorageError):
        make_private_folder(Path("/proc/plexrl-test"))


def test_a_file_in_the_place_of_a_folder_is_refused(shared: Path) -> None:
    (shared / "file").touch()
    with pytest.raises(PermissionDeniedError, match="not a folder"):
        make_private_folder(shared / "file")


@as_root
@pytest.mark.parametrize("which", ["run", "shared_memory", "data"])
def test_a_cluster_does_not_use_folders_of_another_user(
    shared: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folders = Folders.of(shared / "data")
    taken: Path = getattr(folders, which)
    made_by_other_user(taken, "777")
    try:
        with pytest.raises(PermissionDeniedError, match=f"belongs to user {OTHER_USER}"):
            folders.make()
        folders.remove()
        assert taken.exists()
    finally:
        taken.rmdir()
        folders.remove()


@as_root
def test_tiers_and_blobs_do_not_use_folders_of_another_user(shared: Path) -> None:
    taken = shared / "taken"
    made_by_other_user(taken)
    with pytest.raises(PermissionDeniedError):
        Tier(TierName.HOST, taken)
    with pytest.raises(PermissionDeniedError):
        DirectoryBlobStore(taken)


def test_sockets_lie_in_the_users_runtime_directory(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert Folders.of(shared / "data").run.parent == Path(runtime)
        Path(runtime).chmod(0o755)
        assert Folders.of(shared / "data").run.parent == TEMPORARY


@pytest.mark.parametrize("found", ["", "relative", "/nowhere", "/tmp", "/tmp/" + 30 * "long"])
def test_a_runtime_directory_that_is_unsafe_or_too_long_is_not_used(
    shared: Path, monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", found)
    assert Folders.of(shared / "data").run.parent == TEMPORARY
