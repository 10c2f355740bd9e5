"""Reads files of other layouts as records of text, and parses their fields."""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.traces.io.problems import Problem, Report
from plexrl.traces.io.text_lines import cells, lines
from plexrl.traces.schema import shown

if TYPE_CHECKING:
    from plexrl.traces.schema import Fault

Record = tuple[int, Mapping[str, str]]
"""Line number, and cells by column."""

ABSENT = frozenset({"", "nan", "none", "null", "na", "n/a", "-"})
"""Texts for unknown values, in any letter case."""


class Fields:
    """Parses typed fields of one record and collects the faults."""

    def __init__(self, cells: Mapping[str, str], line: int = 0) -> None:
        self._cells = cells
        self.line = line
        self.faults: list[Fault] = []

    def exists(self, name: str) -> bool:
        """Whether the record has the field, with or without a value."""
        return name in self._cells

    def has(self, name: str) -> bool:
        """Whether the field has a value."""
        return self._cells.get(name, "").strip().lower() not in ABSENT

    def text(self, name: str) -> str:
        """The field's text; empty if absent."""
        return self._cells[name].strip() if self.has(name) else ""

    def number(self, name: str) -> float:
        """The field as a finite number."""
        if not self.has(name):
            return self._fault(name, "is missing")
        try:
            value = float(self._cells[name])
        except ValueError:
            return self._fault(name, f"is not a number: {self._shown(name)}")
        if abs(value) > 1e15 or value != value:
            return self._fault(name, f"is not a finite number: {self._shown(name)}")
        return value

    def integer(self, name: str) -> int:
        """The field as a whole number; 8.0 counts as 8."""
        value = self.number(name)
        if not value.is_integer():
            return int(self._fault(name, f"is not a whole number: {self._shown(name)}"))
        return int(value)

    def time(self, name: str) -> float:
        """The field's date and time in seconds since 1970; without a zone it is UTC."""
        if not self.has(name):
            return self._fault(name, "is missing")
        try:
            value = datetime.fromisoformat(self._cells[name].strip())
        except ValueError:
            return self._fault(name, f"is not a date and time: {self._shown(name)}")
        zoned = value if value.tzinfo else value.replace(tzinfo=UTC)
        return zoned.timestamp()

    def _fault(self, name: str, message: str) -> float:
        self.faults.append((name, message))
        return 0.0

    def _shown(self, name: str) -> str:
        return shown(self._cells[name])


def csv_records(path: Path, report: Report, names: tuple[str, ...] | None) -> Iterator[Record]:
    """The records of a CSV file; `names`: columns of a file without a header line."""
    found = cells(path, report)
    if names is None:
        first = next(found, None)
        if first is None:
            report(Problem(line=0, field="", message="the file is empty"))
            return
        names = tuple(name.strip() for name in first[1])
    for line, row in found:
        if len(row) != len(names):
            message = f"has {len(row)} cells instead of {len(names)}"
            report(Problem(line=line, field="", message=message))
            continue
        yield line, dict(zip(names, row, strict=True))


def json_records(path: Path, report: Report) -> Iterator[Record]:
    """The records of a file with one JSON object per line."""
    for line, text in lines(path, report):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            report(Problem(line=line, field="", message="is not JSON"))
            continue
        if not isinstance(value, dict):
            report(Problem(line=line, field="", message="is not a JSON object"))
            continue
        yield line, {str(name): json_text(each) for name, each in value.items()}


def json_text(value: Any) -> str:
    """A JSON value as the text of a cell; null, booleans and containers are empty."""
    if value is None or isinstance(value, bool | list | dict):
        return ""
    return str(value)
