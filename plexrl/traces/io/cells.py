"""Values as the text of a CSV cell, and back, exactly. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from plexrl.traces.schema import Column, Fault, Table, TraceSegment

DIGITS_MAX = 32
"""Of a whole number; Python refuses to read very long ones."""


class CellError(ValueError):
    """A cell that is no value of its column's type; the message says why."""


def defaults(table: Table[Any]) -> dict[str, Any]:
    """What an absent cell of each optional column stands for."""
    found: dict[str, Any] = dict.fromkeys(table.names)
    for field in dataclasses.fields(table.row):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def parse_cells(
    columns: Sequence[tuple[int, Column]], row: Sequence[str], absent: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Fault]]:
    """The typed values of a line whose columns stand at those places, `absent` where there is no
    cell or an empty one, and what could not be read."""
    values = dict(absent)
    faults: list[Fault] = []
    for place, column in columns:
        text = row[place]
        if text:
            try:
                values[column.name] = parse_cell(column, text)
            except CellError as error:
                faults.append((column.name, str(error)))
    return values, faults


def parse_cell(column: Column, text: str) -> Any:
    """The value that a cell which is not empty holds.

    Raises:
        CellError: it holds none of the column's type.
    """
    match column.type:
        case "text":
            return text
        case "integer":
            return _integer(text)
        case "number":
            return _number(text)
        case "segments":
            return tuple(_segment(part) for part in text.split(";"))


def format_cell(value: Any) -> str:
    """The text that `parse_cell` makes `value` of; None and what is empty is the empty cell."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ";".join(
            f"{each.function}:{each.offset_s!r}:{each.duration_s!r}:{each.slack_s!r}"
            for each in value
        )
    return value if isinstance(value, str) else repr(value)


def _integer(text: str) -> int:
    stripped = text.strip()
    # Spreadsheets and pandas write 8 as 8.0.
    whole = stripped[:-2] if stripped.endswith(".0") else stripped
    digits = whole.lstrip("+-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= DIGITS_MAX):
        raise CellError(f"is no whole number: {_shown(text)}")
    try:
        return int(whole)
    except ValueError:
        raise CellError(f"is no whole number: {_shown(text)}") from None


def _number(text: str) -> float:
    try:
        if "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise CellError(f"is no number: {_shown(text)}") from None


def _segment(text: str) -> TraceSegment:
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise CellError(f"is no segment function:offset:duration[:slack]: {_shown(text)}")
    return TraceSegment(
        function=parts[0],
        offset_s=_number(parts[1]),
        duration_s=_number(parts[2]),
        slack_s=_number(parts[3]) if len(parts) == 4 else 0.0,
    )


def _shown(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."
