"""Makes untrusted text safe to show: on a terminal, in a log, as a name.

Characters that control a terminal or the text direction (escape sequences, carriage returns,
bidirectional overrides) can disguise a name or a message. They are shown as JSON escapes, such as
`\\u001b` and `\\u202e`.
"""

import logging

LINE_ENDS = frozenset("\n\t")
SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


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
