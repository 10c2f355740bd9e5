"""Collects the faults of a file by line and field. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from plexrl.errors import TraceError

PROBLEMS_KEPT = 10_000
"""Most faults of one file that are kept; further ones are only counted."""

SHOWN = 20
"""Most faults in an error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault of a file."""

    line: int
    """Line number from 1; for Parquet the row number; 0: the whole file."""
    field: str
    """Column, or empty for the whole line."""
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: " + (f"{self.field} " if self.field else "") + self.message


NO_ROWS = "the file has a header but no rows: add a row, or name another file"

Report = Callable[[Problem], None]


class Problems:
    """A `Report` that collects problems and passes each on to `then`."""

    def __init__(self, then: Report | None = None) -> None:
        self.kept: list[Problem] = []
        self.count = 0
        self._lines = 0
        self._last = -1
        self._then = then

    @property
    def bad_lines(self) -> int:
        """Number of lines with faults; the faults of a line must be reported together."""
        return self._lines

    def __call__(self, problem: Problem) -> None:
        self.count += 1
        self._lines += problem.line != self._last
        self._last = problem.line
        if len(self.kept) < PROBLEMS_KEPT:
            self.kept.append(problem)
        if self._then is not None:
            self._then(problem)

    def error(self, path: str) -> TraceError:
        """One error of all problems."""
        lines = [f"{path}: {problem}" for problem in self.kept[:SHOWN]]
        if self.count > SHOWN:
            lines.append(f"... {self.count - SHOWN} more: see `plexrl traces validate`")
        found = [
            {"line": each.line, "field": each.field, "message": each.message} for each in self.kept
        ]
        return TraceError(
            f"{path} has {self.count} faults in {self.bad_lines} lines; correct them, or skip "
            "those lines by --skip-bad (`skip_bad`)\n" + "\n".join(lines),
            path=path,
            count=self.count,
            problems=found,
        )
