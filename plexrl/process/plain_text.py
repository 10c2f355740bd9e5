"""Text of others, made safe to show: at a terminal, in a log, as a name.

Characters that control a terminal or the order of what it shows (escape sequences, carriage
returns, bidirectional overrides) let a name or a reason pass for something else. They are shown as
escapes such as `\\u001b` and `\\u202e`, as JSON writes them.
"""

import logging

LINE_ENDS = frozenset("\n\t")
SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def is_plain(text: str) -> bool:
    """Whether every character is one that is only seen; line ends and tabs are not."""
    return text.isprintable()


def one_line(text: str) -> str:
    """`text` with every other character as an escape, line ends too."""
    return text if text.isprintable() else "".join(map(_shown, text))


def many_lines(text: str) -> str:
    """`text` with every other character as an escape, but for line ends and tabs."""
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(each if each in LINE_ENDS else _shown(each) for each in text)


class PlainFormatter(logging.Formatter):
    """Messages on one line each, whatever they quote; only our tracebacks have more."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # the library's name
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return many_lines(super().format(record))


def _shown(character: str) -> str:
    """A character, or the escape by which JSON names it."""
    if character.isprintable():
        return character
    if character in SHORT:
        return SHORT[character]
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
