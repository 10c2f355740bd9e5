"""Converts values to the text of a CSV cell and back without loss. Pure."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from plexrl.process.plain_text import csv_text, text_of_csv
from plexrl.traces.schema import Column, Fault, Table, TraceSegment, shown

DIGITS_MAX = 32
"""Most digits of a whole number; Python refuses very long ones."""


class CellError(ValueError):
    """A cell that is not a value of its column's type; the message says why."""


def defaults(table: Table[Any]) -> dict[str, Any]:
    """The value of an absent cell, by column."""
    found: dict[str, Any] = dict.fromkeys(table.names)
    for field in dataclasses.fields(table.row):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
    return found


def parse_cells(
    columns: Sequence[tuple[int, Column]], row: Sequence[str], absent: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Fault]]:
    """The typed values of a line and its parse errors. `columns` have their index in the row; a
    missing or empty cell has the value in `absent`."""
    values = dict(absent)
    faults: list[Fault] = []
    for index, column in columns:
        text = row[index]
        if text:
            try:
                values[column.name] = parse_cell(column, text)
            except CellError as error:
                faults.append((column.name, str(error)))
    return values, faults


def parse_cell(column: Column, text: str) -> Any:
    """The value of a non-empty cell.

    Raises:
        CellError: the text is not of the column's type.
    """
    match column.type:
        case "text":
            return text_of_csv(text)
        case "integer":
            return _integer(text)
        case "number":
            return _number(text)
        case "segments":
            return tuple(_segment(part) for part in text.split(";"))


def format_cell(value: Any) -> str:
    """The text that `parse_cell` reads as `value`; None and empty values are empty cells."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ";".join(
            f"{each.function}:{each.offset_s!r}:{each.duration_s!r}:{each.slack_s!r}"
            for each in value
        )
    return csv_text(value) if isinstance(value, str) else repr(value)


def _integer(text: str) -> int:
    stripped = text.strip()
    # Spreadsheets and pandas write 8 as 8.0.
    whole = stripped[:-2] if stripped.endswith(".0") else stripped
    digits = whole.lstrip("+-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= DIGITS_MAX):
        raise CellError(f"is not a whole number: {shown(text)}")
    try:
        return int(whole)
    except ValueError:
        raise CellError(f"is not a whole number: {shown(text)}") from None


def _number(text: str) -> float:
    try:
        if "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise CellError(f"is not a number: {shown(text)}") from None


def _segment(text: str) -> TraceSegment:
    parts = text.split(":")
    if len(parts) not in (3, 4):
        raise CellError(f"is not a segment function:offset:duration[:slack]: {shown(text)}")
    return TraceSegment(
        function=parts[0],
        offset_s=_number(parts[1]),
        duration_s=_number(parts[2]),
        slack_s=_number(parts[3]) if len(parts) == 4 else 0.0,
    )
