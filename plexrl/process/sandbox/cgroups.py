"""Control groups: bounds on the memory and the processes of a whole sandbox.

Limits of single processes cannot bound what many of them use together. Both versions of control
groups are used where this process may make groups; `docs/rewards.md` says how to allow it.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from plexrl.errors import SandboxError
from plexrl.process.sandbox.limits import Limits

CONTROLLERS = ("memory", "pids")
PREFIX = "plexrl-sandbox-"
REMOVE_S = 5.0
"""How long the kernel may take to note that the last process of a group has ended."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one run: a folder in each hierarchy."""

    folders: tuple[Path, ...]
    events: Path
    """File with a line `oom_kill COUNT`."""

    def add(self, process: int) -> None:
        """Put a process, and those that it starts from now on, under the limits."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(process))

    def is_out_of_memory(self) -> bool:
        """Whether the kernel killed a process because the group's memory was full."""
        lines = (line.split() for line in self.events.read_text().splitlines())
        return any(line[0] == "oom_kill" and int(line[1]) > 0 for line in lines)


class Cgroups:
    """Makes a control group for each run, below the group of this process."""

    def __init__(self, parents: tuple[Path, ...], version: int) -> None:
        """`parents`: one folder of version 2, or one for each of `CONTROLLERS` of version 1."""
        self._parents = parents
        self._version = version
        for parent in parents:
            _remove_abandoned(parent)

    def __repr__(self) -> str:
        return f"<Cgroups of version {self._version} in {', '.join(map(str, self._parents))}>"

    @contextmanager
    def group(self, limits: Limits) -> Iterator[Cgroup]:
        """A group with the limits; it is removed at the end."""
        name = _unique_name()
        folders = tuple(parent / name for parent in self._parents)
        with ExitStack() as stack:
            try:
                for folder in folders:
                    folder.mkdir()
                    stack.callback(_remove, folder)
                self._bound(folders, limits)
            except OSError as error:
                raise SandboxError(
                    f"the sandbox could not make a control group: {error}"
                ) from error
            file = "memory.events" if self._version == 2 else "memory.oom_control"
            yield Cgroup(folders, folders[0] / file)

    def _bound(self, folders: tuple[Path, ...], limits: Limits) -> None:
        memory, pids = folders[0], folders[-1]
        size = str(limits.memory_bytes)
        # One more than the program may have: the first process of the sandbox is ours.
        (pids / "pids.max").write_text(str(limits.processes + 1))
        if self._version == 2:
            (memory / "memory.max").write_text(size)
            (memory / "memory.oom.group").write_text("1")
            swap = memory / "memory.swap.max"
        else:
            (memory / "memory.limit_in_bytes").write_text(size)
            swap = memory / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text("0" if self._version == 2 else size)


def usable_cgroups() -> Cgroups | None:
    """The control groups that this process may use; None if it may use none."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    one = tuple(Path(f"/sys/fs/cgroup/{each}{own.get(each, '')}") for each in CONTROLLERS)
    if all(
        each in own and _is_writable(folder) for each, folder in zip(CONTROLLERS, one, strict=True)
    ):
        return Cgroups(one, 1)
    two = Path(f"/sys/fs/cgroup{own.get('', '/')}")
    # A group with processes cannot give limits to groups below it, so ours may be a sibling.
    for parent in (two, two.parent):
        if parent.is_relative_to("/sys/fs/cgroup") and _gives_limits(parent):
            return Cgroups((parent,), 2)
    return None


def _unique_name() -> str:
    """A name for a control group: with the number of this process, and unlike that of any other
    sandbox in this process."""
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"


def _is_writable(folder: Path) -> bool:
    """Whether this process may make groups in `folder`."""
    tried = folder / _unique_name()
    try:
        tried.mkdir()
    except OSError:
        return False
    tried.rmdir()
    return True


def _gives_limits(folder: Path) -> bool:
    """Whether groups in `folder`, of version 2, can have limits of memory and processes."""
    control = folder / "cgroup.subtree_control"
    with suppress(OSError):
        control.write_text(" ".join(f"+{each}" for each in CONTROLLERS))
    try:
        enabled = control.read_text().split()
    except OSError:
        return False
    may_move = os.access(folder / "cgroup.procs", os.W_OK)
    return set(CONTROLLERS) <= set(enabled) and may_move and _is_writable(folder)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + REMOVE_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _remove_abandoned(parent: Path) -> None:
    """Groups of controllers that were killed; their sandboxes ended with them."""
    for folder in parent.glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{process}").exists():
            with suppress(OSError):
                folder.rmdir()
