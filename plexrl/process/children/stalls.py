"""Whether a process that starts or ends makes progress.

On a busy machine a start may take many times as long as usual, and to kill it and begin anew makes
it take longer still. So what is bounded is not how long a start takes but how long it *sleeps*.
While any of its threads runs, is ready to run, or waits for a disk, it is at work, however slowly.
A start that hangs sleeps. The same holds for a process that is to end and has much to write first.
"""

from pathlib import Path

PROC = Path("/proc")
AT_WORK = ("R", "D")
"""States of a thread: running or ready to run, waiting for a disk."""


def is_at_work(session: int) -> bool:
    """Whether a thread of a process in this session is at work; False where there is no /proc."""
    return any(
        _state_and_session(task)[0] in AT_WORK
        for process in _entries(PROC)
        if _state_and_session(process)[1] == session
        for task in _entries(process / "task")
    )


def _entries(folder: Path) -> list[Path]:
    """The folders of processes or threads; none where their process has ended."""
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _state_and_session(task: Path) -> tuple[str, int]:
    """(state, session id) of a process or thread; an empty state for one that has ended."""
    try:
        stat = (task / "stat").read_text(errors="replace")
    except OSError:
        return "", 0
    # The command's name comes before, in brackets, and may hold anything.
    state, _, _, session = stat.rpartition(")")[2].split()[:4]
    return state, int(session)
