"""Detects whether a process that starts or stops makes progress.

On a busy machine a start may take many times longer than usual, and a kill with a new start would
take even longer. So the bound is not on the duration of a start, but on the time that it *sleeps*.
A process is at work while any of its threads runs, is ready to run or waits for a disk. A start
that hangs sleeps. The same applies to a process that writes much before it stops.
"""

from pathlib import Path

PROC = Path("/proc")
AT_WORK = ("R", "D")
"""Thread states in /proc: running or ready to run; waiting for a disk."""


def is_at_work(leader: int, *, with_children: bool) -> bool:
    """Whether any thread of a process is at work; `with_children`: of any process in the session
    that it leads. False without /proc."""
    if _has_task_at_work(PROC / str(leader)):
        return True
    # All of /proc is read for this, so only if the process itself sleeps.
    return with_children and any(
        _has_task_at_work(process)
        for process in _entries(PROC)
        if _state_and_session(process)[1] == leader
    )


def _has_task_at_work(process: Path) -> bool:
    return any(_state_and_session(task)[0] in AT_WORK for task in _entries(process / "task"))


def _entries(folder: Path) -> list[Path]:
    """The folders of processes or threads; none if their process has ended."""
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _state_and_session(task: Path) -> tuple[str, int]:
    """(state, session id) of a process or thread; an empty state if it has ended."""
    try:
        stat = (task / "stat").read_text(errors="replace")
    except OSError:
        return "", 0
    # The command's name comes before, in parentheses, and may contain any character.
    state, _, _, session = stat.rpartition(")")[2].split()[:4]
    return state, int(session)
