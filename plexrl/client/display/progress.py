"""A controller's progress: log messages and one line for each step.

At a terminal a bar below the lines shows what the controller waits for and how much is left.
Elsewhere there are plain lines only, so that a log, or the output of a notebook, stays readable.
"""

import logging
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final

from plexrl.limits import check_numbers

if TYPE_CHECKING:
    from rich.progress import TaskID

LOGGER: Final = logging.getLogger("plexrl")
STARTING: Final = "starting"


class Progress:
    """Shows what the SDK logs, and reported steps, while its block runs."""

    def __init__(self, steps: int | None = None, *, file: IO[str] | None = None) -> None:
        """`steps` is the number of steps, if known; `file` is standard output by default."""
        from rich import progress
        from rich.console import Console

        check_numbers("progress", {"steps": steps})
        self._steps = steps
        # In a notebook rich would show each line as a box of HTML, and lose them in the saved file.
        self._console = Console(
            file=file, highlight=False, markup=False, emoji=False, force_jupyter=False
        )
        self._bar = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task(STARTING, total=None)
        self._handler = _Shown(self)
        self._before = (LOGGER.level, LOGGER.propagate)
        self._pid = os.getpid()
        self._began = self._last_line = time.monotonic()

    def say(self, text: str) -> None:
        """Show `text` on a line of its own, with the seconds since the start."""
        self._last_line = time.monotonic()
        self._console.print(f"{self._last_line - self._began:6.1f} s  {text}", soft_wrap=True)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show a line for a finished step: its number, `values` by name, and the seconds since the
        line before it."""
        check_numbers("progress", {"step": step})
        took_s = time.monotonic() - self._last_line
        total = "" if self._steps is None else f"/{self._steps}"
        width = len(total) - 1 if total else 4
        row = "".join(f"  {name} {_number(value)}" for name, value in values.items())
        self.say(f"step {step:>{width}}{total}{row}  {took_s:.2f} s")
        self._show(description="training", total=self._steps, completed=step)

    def _show_log(self, text: str) -> None:
        """Show a log message; its first line is on the bar until the next message or step."""
        self.say(text)
        self._show(description=text.partition("\n")[0].partition(":")[0])

    def __enter__(self) -> "Progress":
        self._before = (LOGGER.level, LOGGER.propagate)
        # Shown here, so handlers of the controller's own must not show the message again.
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        LOGGER.addHandler(self._handler)
        self._began = self._last_line = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() == self._pid:
            # In a forked child the bar is its parent's, and its lock may be held for ever.
            self._bar.stop()
        LOGGER.removeHandler(self._handler)
        level, LOGGER.propagate = self._before
        LOGGER.setLevel(level)

    def _show(
        self, *, description: str, total: int | None = None, completed: int | None = None
    ) -> None:
        self._bar.update(
            self._task, description=description, total=total, completed=completed, refresh=True
        )


class _Shown(logging.Handler):
    """Passes log records on to the display."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress._show_log(record.getMessage())


def _number(value: float) -> str:
    """At least seven characters with four significant digits, so that 1e-5 does not look like 0."""
    number = float(value)
    is_small = 0 < abs(number) < 0.01 or abs(number) >= 1e5
    return f"{number:7.3g}" if is_small else f"{number:7.4f}"
