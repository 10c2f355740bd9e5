"""Tables as lines of plain text: for a program as wide as they are, for a person as wide as fits.

Columns are two spaces apart, and a cell without text is `-`, so that every row has all of them. No
word is ever cut: where a terminal is narrower than a table, cells go over several lines between
words, and where even the longest words do not fit side by side, each row becomes a block with a
line for every column.
"""

from collections.abc import Sequence

from rich.cells import cell_len

GAP = "  "
NOTHING = "-"

Row = Sequence[str]


def table_lines(columns: Row, rows: Sequence[Row], width: int | None) -> list[str]:
    """The table for a terminal of `width` characters; absent: for a program or a file."""
    cells = [[cell or NOTHING for cell in row] for row in rows]
    head = [columns] if any(columns) else []
    whole = [columns, *cells]
    natural = [max(cell_len(row[at]) for row in whole) for at in range(len(columns))]
    if width is None:
        return [line for row in [*head, *cells] for line in _row_lines(row, natural)]
    least = [max(_longest_word(row[at]) for row in whole) for at in range(len(columns))]
    room = width - len(GAP) * (len(columns) - 1)
    if sum(least) > room:
        return _blocks(columns, cells, width)
    widths = _shrunk(natural, least, room)
    rule = [["─" * each for each in widths]] if head else []
    return [line for row in [*head, *rule, *cells] for line in _row_lines(row, widths)]


def table_width(columns: Row, rows: Sequence[Row]) -> int:
    """Characters that the table takes where nothing goes over several lines."""
    widest = [max(cell_len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
    return sum(widest) + len(GAP) * (len(columns) - 1)


def wrapped(text: str, width: int) -> list[str]:
    """`text` on lines of at most `width` characters, but for words that are longer."""
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
    """A block for each row, with a line for every column."""
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


def _shrunk(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that fit into `room`: the widest columns give way first, none below its `least`."""
    widths = list(natural)
    for _ in range(sum(natural) - room):
        _, at = max((width, at) for at, width in enumerate(widths) if width > least[at])
        widths[at] -= 1
    return widths
