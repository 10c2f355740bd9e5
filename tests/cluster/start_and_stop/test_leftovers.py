"""The next cluster removes what a killed cluster left outside its data directory."""

import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from plexrl.cluster.data_dir.folder import make_data_dir
from plexrl.cluster.embedded.start import start_embedded
from plexrl.errors import ConflictError
from plexrl.process.folders.folders import Folders
from plexrl.process.folders.leftovers import LOCK, OWNER, claimed, make_temporary_data, sweep


def killed(data_dir: Path | None) -> Folders:
    """The folders of a cluster whose processes were all killed."""
    running = start_embedded(data_dir, virtual_gpus=1)
    supervisor = psutil.Process(running.pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)
    running.close()
    return Folders.of(running.data_dir)


@pytest.mark.slow
@pytest.mark.usefixtures("own_fork_servers")
def test_the_next_cluster_removes_files_of_killed_clusters_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests have temporary files, too.
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", None)
    temporary = killed(None)
    lasting = killed(tmp_path / "lasting")
    living = start_embedded(tmp_path / "living", virtual_gpus=1)
    try:
        for left in (temporary, lasting):
            assert not left.run.exists()
        assert not temporary.data.exists()
        assert not temporary.shared_memory.exists()
        assert lasting.shared_memory.exists(), "the next cluster of its data goes on with it"
        shutil.rmtree(lasting.data)
        brief = start_embedded(virtual_gpus=1)
        brief.close()
        assert not brief.data_dir.exists()
        assert not lasting.shared_memory.exists()
        for folder in (Folders.of(living.data_dir).run, Folders.of(living.data_dir).shared_memory):
            assert (folder / OWNER).exists()
    finally:
        living.close()
    assert list(scratch.iterdir()) == []


def test_folders_without_an_owner_or_with_a_live_owner_stay(tmp_path: Path) -> None:
    sockets, memory = tmp_path / "run", tmp_path / "shm"
    for parent in (sockets, memory):
        parent.mkdir()
        (parent / "plexrl-unknown").mkdir(mode=0o700)
    with claimed(sockets / "plexrl-live", tmp_path), claimed(memory / "plexrl-live", tmp_path):
        with pytest.raises(ConflictError), claimed(sockets / "plexrl-live", tmp_path):
            pass
        for parent in (sockets, memory):
            (parent / "plexrl-dead").mkdir(mode=0o700)
            (parent / "plexrl-dead" / OWNER).write_text(str(tmp_path / "gone"))
        sweep((sockets, sockets), memory)
        found = sorted(path.name for path in sockets.iterdir())
        assert found == ["plexrl-live", "plexrl-unknown"]
        assert len(list(memory.iterdir())) == 2


def test_a_folder_open_to_others_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "plexrl-open"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / OWNER).touch()
    sweep((tmp_path,), tmp_path)
    assert folder.exists()


def test_a_users_directory_named_like_a_temporary_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    temporary = make_temporary_data()
    named = make_data_dir(tmp_path / "plexrl-data-mine")
    (temporary / LOCK).touch()
    sweep((tmp_path / "run",), tmp_path / "shm")
    assert not temporary.exists()
    assert (named / LOCK).exists()


def test_host_tiers_stay_while_their_data_directory_may_exist(tmp_path: Path) -> None:
    owners: dict[str, str | bytes] = {
        "unnamed": "",
        "relative": "data",
        "too-long": f"/{'x' * 5000}",
        "no-text": b"\xff",
        "there": str(tmp_path),
        "gone": str(tmp_path / "gone"),
    }
    for name, owner in owners.items():
        (tmp_path / f"plexrl-{name}").mkdir(mode=0o700)
        content = owner if isinstance(owner, bytes) else owner.encode()
        (tmp_path / f"plexrl-{name}" / OWNER).write_bytes(content)
    sweep((tmp_path,), tmp_path)
    left = {path.name.removeprefix("plexrl-") for path in tmp_path.iterdir()}
    assert left == set(owners) - {"gone"}
