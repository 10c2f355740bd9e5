"""No process outlives the one that started it."""

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping

PR_SET_PDEATHSIG = 1
PARENT = "PLEXRL_PARENT"
"""Variable by which a process is told whose child it is to be."""


def die_with_parent(sig: int = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Have the kernel send this process `sig` when its parent dies (Linux; elsewhere no effect).

    The kernel says nothing of a parent that died before: given the process id of `parent`, this
    process sends itself `sig` where that is not its parent any more.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), sig)


def die_with_named_parent(environment: MutableMapping[str, str]) -> None:
    """As `die_with_parent`, of the parent that `environment` names, if it names one. The name is
    taken out of it: it is not for what this process starts."""
    name = environment.pop(PARENT, "")
    die_with_parent(parent=int(name) if name.isdigit() else None)
