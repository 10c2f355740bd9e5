"""What is wrong with a file: all of it, by line and field. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from plexrl.errors import TraceError

PROBLEMS_KEPT = 10_000
"""Of one file; more are counted only, or a file of nothing but faults would fill memory."""

SHOWN = 20
"""In an error's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault of a file."""

    line: int
    """Of a text file, from 1; of Parquet, the row, from 1; 0: of the file as a whole."""
    field: str
    """Column, or empty where the line as a whole is meant."""
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: " + (f"{self.field} " if self.field else "") + self.message


Report = Callable[[Problem], None]


class Problems:
    """Takes problems in: `Problems()` is a `Report`; `then` is told of each as well."""

    def __init__(self, then: Report | None = None) -> None:
        self.kept: list[Problem] = []
        self.count = 0
        self._lines = 0
        self._last = -1
        self._then = then

    @property
    def bad_lines(self) -> int:
        """Lines that have any; faults of a line are reported together."""
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
        """All of them as one error."""
        lines = [f"{path}: {problem}" for problem in self.kept[:SHOWN]]
        if self.count > SHOWN:
            lines.append(f"... {self.count - SHOWN} more: see `plexrl traces validate`")
        found = [
            {"line": each.line, "field": each.field, "message": each.message} for each in self.kept
        ]
        return TraceError(
            f"{path} has {self.count} faults in {self.bad_lines} lines; mend them, or go on "
            "without those lines by --skip-bad (`skip_bad`)\n" + "\n".join(lines),
            path=path,
            count=self.count,
            problems=found,
        )
