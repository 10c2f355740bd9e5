"""Ensures that a process ends when its parent ends."""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

PR_SET_PDEATHSIG = 1
PARENT = "PLEXRL_PARENT"
"""Environment variable with the process id of the expected parent."""


def die_with_parent(*, parent: int | None = None) -> None:
    """Make the kernel kill this process when its parent dies (Linux; else no effect).

    The kernel does not report a parent that died before this call. So if `parent` is given and is
    not the parent's process id, this process kills itself.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_named_parent(environment: MutableMapping[str, str]) -> None:
    """As `die_with_parent`, with the parent that `environment` names, if any.

    The variable is removed, because it does not apply to children of this process.
    """
    name = environment.pop(PARENT, "")
    die_with_parent(parent=int(name) if name.isdigit() else None)


def environment_of_child() -> dict[str, str]:
    """This process's environment, which names it as the parent for `die_with_named_parent`."""
    return {**os.environ, PARENT: str(os.getpid())}
