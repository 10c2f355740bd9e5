"""Workers die with the fork server they come from, and with no other process."""

import os
import subprocess
import sys
from pathlib import Path

import plexrl
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.process.children.lifeline import PARENT
from plexrl.worker.agent.launcher import LocalLauncher
from plexrl.worker.interface.config import WorkerConfig
from tests.small_disk import small_disk

TIED = (
    "from plexrl.worker.agent.launcher import tie_to_fork_server; "
    "tie_to_fork_server(); print('lives')"
)


def output_of(code: str, **environment: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.strip()


def test_a_fork_of_a_server_that_could_not_import_plexrl_lives() -> None:
    assert output_of(TIED, **{PARENT: "1"}) == "lives"


def test_the_fork_server_s_parent_is_not_that_of_what_its_forks_start() -> None:
    code = (
        "import os, plexrl.worker.agent.fork_server.lifeline as lifeline; "
        f"print(lifeline.FORK_SERVER == os.getpid(), {PARENT!r} in os.environ)"
    )
    assert output_of(code, **{PARENT: str(os.getpid())}) == "True False"


def test_a_process_whose_fork_server_is_another_ends() -> None:
    code = (
        "import plexrl.worker.agent.fork_server.lifeline as lifeline; "
        f"lifeline.FORK_SERVER = 1; {TIED}"
    )
    assert output_of(code) == ""


def test_a_worker_that_finds_no_room_to_start_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        disk.fill()
        spec = DeploymentSpec(
            model=plexrl.tiny_qwen2("0123", seed=1), kind="train", backend="fsdp", workers=1
        )
        config = WorkerConfig(
            deployment="j/actor",
            job="j",
            kind="train",
            incarnation=1,
            rank=0,
            world_size=1,
            group="g",
            address=f"unix:{tmp_path}/w.sock",
            # The ranks of a train deployment find each other over this file.
            rendezvous=str(disk.path / "r"),
            statemanager=str(tmp_path / "sm.sock"),
            ticket=b"",
            checkpoint_url=str(tmp_path),
            spec_json=spec.to_json(),
            log_path=str(tmp_path / "0.log"),
            threads=1,
        )
        worker = LocalLauncher().start(config)
        try:
            # First it says that it lives.
            while (said := worker.ready.recv()) is None:
                pass
            assert said["code"] == "storage_full"
        finally:
            worker.stop()
