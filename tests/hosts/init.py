"""The first process of a simulated host: it builds the host's root directory and adopts orphans.

`python init.py CONFIG.json`, as process 1 of new mount, PID, IPC and UTS namespaces. It prints `up`
once the host is ready, and ends when its standard input ends; the kernel then kills every other
process of the host. The module imports the standard library only, so that it starts quickly.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
LINKS = ("bin", "lib", "lib64", "sbin")
"""Directories of `/` that are links into `/usr` on most distributions."""
FORMER_ROOT = ".former"


def main(config: dict[str, Any]) -> None:
    """Make the root directory, then wait for the end of standard input."""
    _mount("--make-rprivate", "/")
    root = Path(config["disk"])
    _mount("--bind", str(root), str(root))
    # First, because the sources may lie below one of them.
    for name in ("tmp", "run"):
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(_folder(root / name)))
    for path in config["read_only"]:
        _bind_read_only(Path(path), root)
    for name in LINKS:
        _link(Path("/", name), root / name)
    _make_devices(root, config["shared_memory_bytes"])
    _mount("-t", "proc", "proc", str(_folder(root / "proc")))
    _mount("-t", "sysfs", "-o", "ro", "sysfs", str(_folder(root / "sys")))
    socket.sethostname(config["name"])
    _enter(root)
    signal.signal(signal.SIGCHLD, _reap)
    os.write(1, b"up\n")
    while os.read(0, 1024):
        pass


def _bind_read_only(path: Path, root: Path) -> None:
    inside = _folder(root / path.relative_to("/"))
    _mount("--bind", str(path), str(inside))
    _mount("-o", "remount,bind,ro", str(inside))


def _link(path: Path, inside: Path) -> None:
    if path.is_symlink():
        if not inside.is_symlink():
            inside.symlink_to(path.readlink())
    elif path.is_dir():
        _bind_read_only(path, inside.parent)


def _make_devices(root: Path, shared_memory_bytes: int) -> None:
    folder = _folder(root / "dev")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(folder))
    for name in DEVICES:
        (folder / name).touch()
        _mount("--bind", f"/dev/{name}", str(folder / name))
    memory = _folder(folder / "shm")
    _mount("-t", "tmpfs", "-o", f"mode=1777,size={shared_memory_bytes}", "tmpfs", str(memory))
    _mount(
        "-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", str(_folder(folder / "pts"))
    )
    (folder / "ptmx").symlink_to("pts/ptmx")
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (folder / name).symlink_to(target)
    (folder / "stderr").symlink_to("fd/2")


def _enter(root: Path) -> None:
    """Make `root` the root directory of this mount namespace, and detach the former one."""
    former = _folder(root / FORMER_ROOT)
    subprocess.run(["pivot_root", str(root), str(former)], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", f"/{FORMER_ROOT}"], check=True)
    Path("/", FORMER_ROOT).rmdir()


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
