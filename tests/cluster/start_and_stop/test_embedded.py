"""An embedded cluster lives as long as the scripts that use its data directory."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

import plexrl
from plexrl.cli.app import app
from plexrl.cluster.data_dir.endpoint import Endpoint, read_endpoint
from plexrl.cluster.data_dir.folder import try_lock
from plexrl.cluster.embedded.start import start_embedded
from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    StorageError,
)
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import has_ended, wait_until

SCRIPT = """
import sys
import plexrl
with plexrl.connect() as cluster:
    print(cluster.url, cluster.status()["nodes"], flush=True)
    sys.stdin.read()
"""


class Script:
    """A process that uses the cluster of a data directory until its standard input ends."""

    def __init__(self, data_dir: Path, stack: ExitStack, code: str = SCRIPT) -> None:
        environment = {**os.environ, "PLEXRL_DATA_DIR": str(data_dir)}
        environment.pop("PLEXRL_URL", None)
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)

    def line(self) -> str:
        """The line that it prints once it is connected."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.strip()

    def end(self) -> str:
        """End it; return its standard error."""
        _, output = self.process.communicate("", timeout=120)
        assert self.process.returncode == 0, output
        return output


@contextmanager
def up(data_dir: Path) -> Iterator[dict[str, str]]:
    """`plexrl up` on the data directory."""
    words = ("up", "--data-dir", str(data_dir), "--virtual-gpus", "2", "--json")
    with subprocess.Popen(
        [sys.executable, "-m", "plexrl.cli.app", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(60)


def supervisor_of(data_dir: Path) -> psutil.Process:
    running = read_endpoint(data_dir)
    assert running is not None
    return psutil.Process(running.pid)


def test_concurrent_scripts_share_one_cluster_that_ends_with_the_last(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    with ExitStack() as stack:
        scripts = [Script(data, stack) for _ in range(3)]
        assert len({script.line() for script in scripts}) == 1
        supervisor = supervisor_of(data)
        parts = supervisor.children(recursive=True)
        shown = subprocess.run(
            [sys.executable, "-m", "plexrl.cli.app", "status", "--json"],
            env={**os.environ, "PLEXRL_DATA_DIR": str(data)},
            capture_output=True,
            check=True,
        ).stdout
        assert json.loads(shown)["nodes"] == 1
        up_on_it = subprocess.run(
            [sys.executable, "-m", "plexrl.cli.app", "up", "--data-dir", str(data)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert up_on_it.returncode == 1
        assert "an embedded cluster runs on" in up_on_it.stderr
        starter = next(
            script
            for script in scripts
            if supervisor.pid
            in {each.pid for each in psutil.Process(script.process.pid).children()}
        )
        starter.process.kill()
        starter.process.wait()
        second, last = (script for script in scripts if script is not starter)
        assert second.end() == "", "a script says nothing to a pipe"
        assert not has_ended(supervisor)
        with plexrl.connect(data_dir=data) as cluster:
            assert cluster.status()["nodes"] == 1
        last.process.kill()
        wait_until(lambda: has_ended(supervisor), "the cluster outlives its last script")
        # Helpers of parts end when their pipes do.
        wait_until(lambda: all(map(has_ended, parts)), "parts outlive the cluster")
    assert not Folders.of(data).run.exists()
    assert not Folders.of(data).shared_memory.exists()


@pytest.mark.slow
def test_the_last_script_waits_for_the_end_and_the_next_starts_a_new_cluster(
    tmp_path: Path,
) -> None:
    with plexrl.connect(data_dir=tmp_path) as cluster:
        supervisor = supervisor_of(tmp_path)
        with plexrl.connect(data_dir=tmp_path) as again:
            assert again.url == cluster.url
        with pytest.raises(ConflictError, match="scripts"):
            start_embedded(tmp_path)
        assert not has_ended(supervisor)
    assert read_endpoint(tmp_path) is None
    lock = try_lock(tmp_path)
    assert lock is not None, "its cluster has not ended"
    lock.close()
    with plexrl.connect(data_dir=tmp_path):
        assert supervisor_of(tmp_path) != supervisor
        supervisor_of(tmp_path).kill()
    with plexrl.connect(data_dir=tmp_path) as cluster:
        assert cluster.status()["nodes"] == 1


@pytest.mark.slow
def test_a_script_joins_the_cluster_of_plexrl_up_and_does_not_end_it(tmp_path: Path) -> None:
    with up(tmp_path) as endpoint, ExitStack() as stack:
        script = Script(tmp_path, stack)
        assert script.line() == f"{endpoint['url']} 1"
        script.end()
        assert supervisor_of(tmp_path).pid == int(endpoint["pid"])
        with plexrl.connect(data_dir=tmp_path) as cluster:
            assert cluster.nodes()[0]["gpus"] == 2


SAVING = """
import sys
import plexrl
with plexrl.connect() as cluster, cluster.create_job("saves") as job:
    actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789abcdefghij"))
    saved = actor.save_checkpoint("last").result()
    assert saved["durable"]
    print(saved["path"], flush=True)
"""


@pytest.mark.slow
def test_checkpoints_outlive_the_script_and_their_location_is_shown(
    tmp_path: Path,
) -> None:
    ours, theirs = pty.openpty()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", SAVING],
            env={**os.environ, "PLEXRL_DATA_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=True,
            timeout=300,
        )
        output = os.read(ours, 65_536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    path = Path(ended.stdout.strip())
    assert path.is_relative_to(tmp_path / "checkpoints")
    assert (path / "model.safetensors").exists()
    assert f"starting an embedded cluster on {tmp_path}" in output
    assert "http://127.0.0.1:" in output
    assert f"plexrl status --data-dir {tmp_path}" in output
    assert f"checkpoints are in {tmp_path / 'checkpoints'}" in output


def test_files_of_a_killed_cluster_do_not_count_even_if_its_pid_is_reused(
    tmp_path: Path,
) -> None:
    (tmp_path / "operator.key").write_text("plx-key")
    stale = Endpoint("http://127.0.0.1:1", "plx-key", os.getpid(), str(tmp_path), True)
    (tmp_path / "cluster.json").write_text(stale.to_file())
    assert read_endpoint(tmp_path) is None
    lock = try_lock(tmp_path)
    assert lock is not None
    with lock:
        assert read_endpoint(tmp_path) == stale
        assert try_lock(tmp_path) is None
    assert read_endpoint(tmp_path) is None


def test_url_and_data_dir_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="give one of them"):
        plexrl.connect("http://127.0.0.1:1", "plx-key", data_dir=tmp_path)


def bad_folders(tmp_path: Path) -> dict[str, type[plexrl.PlexRLError]]:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return {
        "/proc/plexrl": StorageError,
        "/dev/null/plexrl": StorageError,
        f"{tmp_path}/file": PermissionDeniedError,
        # From Python 3.13 on, resolving a path passes over a loop.
        f"{tmp_path}/loop": PermissionDeniedError if sys.version_info >= (3, 13) else StorageError,
        "~nobody-of-this-name/plexrl": StorageError,
    }


def test_an_unusable_data_directory_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for folder, kind in bad_folders(tmp_path).items():
        with pytest.raises(kind) as raised:
            plexrl.connect(data_dir=folder)
        assert Path(folder).name in raised.value.message
        assert "another" in raised.value.message
        for command in ("up", "status"):
            ended = CliRunner().invoke(app, [command, "--data-dir", folder])
            assert ended.exit_code == 1
            assert isinstance(ended.exception, PlexRLError)
            if command == "up":
                assert "another" in ended.exception.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_data_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="PLEXRL_DATA_DIR"):
        plexrl.connect(data_dir=tmp_path / "data")


ROOT = str(Path(__file__).parents[3])
IN_SMALL_MEMORY = """
import plexrl
from tests.cluster.tools import some_batch
with plexrl.connect() as cluster, cluster.create_job("j") as job:
    actor = job.train_deployment("actor", plexrl.tiny_qwen2("0123456789abcdefghij"))
    actor.forward_backward(some_batch(1), plexrl.losses.grpo())
    actor.optim_step(learning_rate=1e-3).result()
    actor.save_checkpoint("c").result()
print("trained")
"""


@pytest.mark.slow
def test_a_container_with_the_usual_shared_memory_trains(tmp_path: Path) -> None:
    """Docker gives 64 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small /dev/shm")
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, IN_SMALL_MEMORY],
        env={
            **os.environ,
            "PLEXRL_DATA_DIR": str(tmp_path / "data"),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "trained\n", done.stderr
