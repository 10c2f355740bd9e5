"""A StateManager is reached by its path only where the path names its own socket."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plexrl.statemanager.protocol.address import announced, nearest

REMOTE = "tcp://10.0.0.3:7411"
NEAREST = """
import socket, sys
from plexrl.statemanager.protocol.address import nearest
if sys.argv[2] == "serve":
    socket.socket(socket.AF_UNIX).bind(sys.argv[3])
print(nearest(sys.argv[1]))
"""


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A socket in a directory of its own."""
    directory = tmp_path / "run"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        # Its name is short, because a socket's path may have 107 bytes only.
        listening.bind(str(directory / "s"))
        yield str(directory / "s")


def namespaces_work() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


needs_namespaces = pytest.mark.skipif(
    not namespaces_work(), reason="mount namespaces need root: run the tests as root"
)


def seen_from(setup: str, address: str, *words: str) -> str:
    """`nearest` in a mount namespace, after the shell commands `setup`."""
    inner = f'{setup} && exec {sys.executable} -c "$0" "$@"'
    command = ["unshare", "--mount", "sh", "-c", inner, NEAREST, address, *(words or ("look",))]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    return found.stdout.strip()


def test_the_path_is_used_in_the_process_that_announced_it(path: str) -> None:
    assert nearest(announced(path, REMOTE)) == path


def test_a_daemon_that_serves_no_other_nodes_is_its_path() -> None:
    assert nearest(announced("/nowhere/s", "")) == "/nowhere/s"
    assert nearest(REMOTE) == REMOTE


def test_a_restarted_daemon_is_still_reached_by_its_path(path: str) -> None:
    address = announced(path, REMOTE)
    Path(path).unlink()
    assert nearest(address) == REMOTE
    with socket.socket(socket.AF_UNIX) as again:
        again.bind(path)
        assert nearest(address) == path


def test_another_machine_with_the_same_path_uses_the_network(path: str) -> None:
    place = announced(path, REMOTE).partition("#")[2]
    assert nearest(f"{REMOTE}#00000000-another-boot-{place}") == REMOTE


@needs_namespaces
def test_a_mount_namespace_with_its_own_socket_at_the_path_uses_the_network(path: str) -> None:
    own = f"mount -t tmpfs none {Path(path).parent}"
    assert seen_from(own, announced(path, REMOTE), "serve", path) == REMOTE


@needs_namespaces
def test_a_mount_namespace_that_sees_the_same_directory_uses_the_path(path: str) -> None:
    assert seen_from("true", announced(path, REMOTE)) == path


@needs_namespaces
def test_a_mount_namespace_without_the_socket_uses_the_network(path: str) -> None:
    hidden = f"mount -t tmpfs none {Path(path).parent}"
    assert seen_from(hidden, announced(path, REMOTE)) == REMOTE
