"""Makes untrusted text safe to show: on a terminal, in a log, as a name.

Characters that control a terminal or the text direction (escape sequences, carriage returns,
bidirectional overrides) can disguise a name or a message. They are shown as JSON escapes, such as
`\\u001b` and `\\u202e`.

A spreadsheet runs a cell that begins like a formula; in CSV such text gets an apostrophe in front.
"""

import logging

LINE_ENDS = frozenset("\n\t")
SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters of a spreadsheet's formulas; the last four are the full-width forms."""


def is_plain(text: str) -> bool:
    """Whether every character is printable; line ends and tabs are not."""
    return text.isprintable()


def one_line(text: str) -> str:
    """`text` with every unprintable character, including line ends, as an escape."""
    return text if text.isprintable() else "".join(map(_shown, text))


def many_lines(text: str) -> str:
    """`text` with every unprintable character, except line ends and tabs, as an escape."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(each if each in LINE_ENDS else _shown(each) for each in text)


def csv_text(text: str) -> str:
    """`text` as a cell of CSV that no spreadsheet takes for a formula. Text that already has
    apostrophes before a formula gets one more, so `text_of_csv` restores every text."""
    return "'" + text if text.lstrip("'").startswith(FORMULA_STARTS) else text


def text_of_csv(cell: str) -> str:
    """The text that `csv_text` made `cell` of."""
    is_escaped = cell.startswith("'") and cell.lstrip("'").startswith(FORMULA_STARTS)
    return cell[1:] if is_escaped else cell


class PlainFormatter(logging.Formatter):
    """Formats each message on one line, whatever it quotes; only tracebacks have several lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return many_lines(super().format(record))


def _shown(character: str) -> str:
    """A printable character, or the JSON escape of another one."""
    if character.isprintable():
        return character
    if character in SHORT:
        return SHORT[character]
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
