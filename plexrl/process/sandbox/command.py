"""The command line of bubblewrap: what a program sees.

A program sees an empty, read-only file system with the system's programs and libraries, a `/tmp`
and a `/proc` of its own, and nothing of the environment, the network, the processes and the files
of the controller.
"""

import os
import shlex
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import SandboxError
from plexrl.process.sandbox.limits import Limits

NOBODY = 65534
"""User and group of programs. Outside of the sandbox they are the controller's, or these if the
controller is root: no limit on processes binds root, and a fault of the kernel would give root."""
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
)
"""Files of the system that programs need, where they exist. Nothing else of `/etc` is visible."""
PROGRAM_FOLDER = "/program"
START_MARK = b"\x06"
"""Written to the standard error before the program starts. If the controller was killed, nobody
reads there, and the write ends the process. bubblewrap itself would go on."""
START = """printf '\\006' >&2 && exec "$@\""""
PROGRAMS = "/usr/local/bin:/usr/bin:/bin"
"""Where bubblewrap and others are looked for, and programs of the sandbox besides its Python."""

ASIDE = Path("/sys")
"""Where closed folders are kept while others take their places: it exists, and nothing needs it."""


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """Makes the command lines of runs. Made once: it looks at the file system."""

    prefix: tuple[str, ...]
    """Starts bubblewrap without root's rights."""
    view: tuple[str, ...]
    """bubblewrap's options for the file system."""
    path: str
    """The variable PATH."""

    def arguments(
        self,
        limits: Limits,
        files: Sequence[tuple[str, int]],
        *,
        seccomp: int,
        status: int,
        go: int,
    ) -> list[str]:
        """Everything before the program's own command.

        Args:
            limits: for the sizes of the file systems.
            files: name in `/program` and open descriptor of each file.
            seccomp: descriptor with the filter.
            status: descriptor to which bubblewrap writes process id and exit code.
            go: descriptor at which it waits for a byte before it starts the program.
        """
        size = str(limits.tmp_bytes)
        copies = [
            each
            for name, descriptor in files
            for each in ("--perms", "0555", "--file", str(descriptor), f"{PROGRAM_FOLDER}/{name}")
        ]
        return [
            *self.prefix,
            *("--unshare-all", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"),
            *("--cap-drop", "ALL", "--new-session", "--die-with-parent"),
            *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"),
            *("--remount-ro", "/dev", "--size", size, "--tmpfs", "/tmp", *self.view),
            *("--perms", "0755", "--dir", PROGRAM_FOLDER, *copies, "--remount-ro", "/"),
            *("--chdir", "/tmp", "--clearenv", "--setenv", "PATH", self.path),
            *("--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
            *("--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1"),
            *("--seccomp", str(seccomp), "--json-status-fd", str(status), "--block-fd", str(go)),
            *("--", "/bin/sh", "-c", START, "sh"),
            # Set in here: outside, the processes of all sandboxes would count as one user's.
            # The soft limit of CPU time ends a program by a signal that says why.
            *("prlimit", f"--as={limits.memory_bytes}", f"--nproc={limits.processes}"),
            *(f"--nofile={limits.open_files}", f"--fsize={limits.tmp_bytes}", "--core=0"),
            *(f"--cpu={limits.cpu_s}:{limits.cpu_s + 1}", "--memlock=0", "--msgqueue=0"),
            *("--sigpending=256", "--"),
        ]


def sandbox_command(folders: Sequence[Path]) -> SandboxCommand:
    """How programs run on this machine; they see `folders`, read-only, and the controller's Python.

    Raises:
        SandboxError: bubblewrap is not installed, or this is not Linux.
    """
    bwrap = _installed("bwrap", "bubblewrap")
    _installed("prlimit", "util-linux")
    shown = _outermost([*map(Path, folders), Path(sys.base_prefix)])
    view = [each for path in SYSTEM for each in _as_in_the_system(Path(path))]
    for folder in shown:
        if not folder.is_dir():
            raise SandboxError(f"the sandbox shall show {folder}, which is no folder")
        view += ["--ro-bind", str(folder), str(folder)]
    prefix = [bwrap]
    if os.geteuid() == 0:
        setpriv = _installed("setpriv", "util-linux")
        drop = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        prefix = [*_open_for_nobody(shown), *drop, bwrap]
    path = f"{sys.base_prefix}/bin:{PROGRAMS}"
    return SandboxCommand(tuple(prefix), tuple(view), path)


def _installed(program: str, package: str) -> str:
    found = shutil.which(program, path=PROGRAMS)
    if found is None:
        raise SandboxError(
            f"the sandbox needs {program}, which is not installed: apt-get install {package} "
            f"(Debian, Ubuntu) or dnf install {package} (Fedora, RHEL)"
        )
    return found


def _as_in_the_system(path: Path) -> list[str]:
    if path.is_symlink() and len(path.parts) == 2:
        return ["--symlink", str(path.readlink()), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.exists() else []


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """The folders that are neither in `/usr` nor in another one of them."""
    found: list[Path] = []
    for folder in sorted({each.absolute() for each in folders}, key=lambda each: len(each.parts)):
        if not any(folder.is_relative_to(each) for each in (Path("/usr"), *found)):
            found.append(folder)
    return found


def _open_for_nobody(folders: Sequence[Path]) -> list[str]:
    """Command that makes `folders` reachable for everyone, for the command after it only.

    An interpreter in root's home cannot be reached by another user. In a mount namespace, an empty
    folder that everyone may enter takes the place of the closed one, and `folders` are in it. The
    command executes the next one in its own process: a parent without the right to send signals
    to another user's processes would not take them along when it ends.
    """
    steps: list[str] = []
    aside: dict[Path, Path] = {}
    for folder in folders:
        parents = (*reversed(folder.parents), folder)
        closed = next((parent for parent in parents if _is_closed(parent)), None)
        if closed is None:
            continue
        if closed not in aside:
            aside[closed] = ASIDE / str(len(aside))
            steps += [
                shlex.join(("mkdir", str(aside[closed]))),
                shlex.join(("mount", "--bind", str(closed), str(aside[closed]))),
                shlex.join(("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(closed))),
            ]
        source = aside[closed] / folder.relative_to(closed)
        steps += [
            shlex.join(("mkdir", "-p", str(folder))),
            shlex.join(("mount", "--bind", str(source), str(folder))),
        ]
    if not steps:
        return []
    first = ("set -e", "umask 022", f"mount -t tmpfs tmpfs {ASIDE}")
    script = "\n".join([*first, *steps, 'exec "$@"'])
    unshare = _installed("unshare", "util-linux")
    return [unshare, "--mount", "--propagation", "private", "/bin/sh", "-c", script, "sh"]


def _is_closed(folder: Path) -> bool:
    return not folder.stat().st_mode & stat.S_IXOTH
