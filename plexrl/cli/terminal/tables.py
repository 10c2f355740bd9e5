"""Formats tables as plain text: in full width for programs, fitted to the terminal for people.

Columns are two spaces apart, and an empty cell is `-`, so that every row has all columns. Words are
never cut: on a narrow terminal cells wrap between words, and if even the longest words do not fit,
each row becomes a block with one line per column.
"""

from collections.abc import Sequence

from rich.cells import cell_len

GAP = "  "
EMPTY = "-"

Row = Sequence[str]


def table_lines(columns: Row, rows: Sequence[Row], width: int | None) -> list[str]:
    """The lines of a table for a terminal of `width` characters; None: a pipe or a file."""
    cells = [[cell or EMPTY for cell in row] for row in rows]
    head = [columns] if any(columns) else []
    whole = [columns, *cells]
    natural = [max(cell_len(row[at]) for row in whole) for at in range(len(columns))]
    if width is None:
        return [line for row in [*head, *cells] for line in _row_lines(row, natural)]
    least = [max(_longest_word(row[at]) for row in whole) for at in range(len(columns))]
    available = width - len(GAP) * (len(columns) - 1)
    if sum(least) > available:
        return _blocks(columns, cells, width)
    widths = _shrunk(natural, least, available)
    rule = [["─" * width for width in widths]] if head else []
    return [line for row in [*head, *rule, *cells] for line in _row_lines(row, widths)]


def table_width(columns: Row, rows: Sequence[Row]) -> int:
    """Width of the table without wrapping."""
    widest = [max(cell_len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    return sum(widest) + len(GAP) * (len(columns) - 1)


def wrapped(text: str, width: int) -> list[str]:
    """`text` wrapped to `width` characters; longer words have lines of their own."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def _row_lines(row: Row, widths: Sequence[int]) -> list[str]:
    cells = [wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for at in range(max(map(len, cells), default=0)):
        parts = [cell[at] if at < len(cell) else "" for cell in cells]
        padded = [
            part + " " * (width - cell_len(part)) for part, width in zip(parts, widths, strict=True)
        ]
        lines.append(GAP.join(padded).rstrip())
    return lines


def _blocks(columns: Row, rows: Sequence[Row], width: int) -> list[str]:
    """One block per row, with one line per column."""
    label = max(map(cell_len, columns), default=0)
    lines: list[str] = []
    for number, row in enumerate(rows):
        if number:
            lines.append("")
        for column, cell in zip(columns, row, strict=True):
            begin = column + " " * (label - cell_len(column)) + GAP
            for line in wrapped(cell, width - label - len(GAP)):
                lines.append((begin + line).rstrip())
                begin = " " * (label + len(GAP))
    return lines


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split(" ")))


def _shrunk(natural: Sequence[int], least: Sequence[int], available: int) -> list[int]:
    """Widths with a sum of `available`: the widest columns shrink first, none below `least`."""
    widths = list(natural)
    for _ in range(sum(natural) - available):
        _, at = max((width, at) for at, width in enumerate(widths) if width > least[at])
        widths[at] -= 1
    return widths
