"""The elements of a file that is one long JSON list, one after the other.

The list is never in memory as a whole: what is held is a piece of the file and one element.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from plexrl.traces.io.problems import Problem, Report
from plexrl.traces.io.text_lines import open_bytes

PIECE_CHARACTERS = 1 << 20
ELEMENT_CHARACTERS_MAX = 1 << 24
"""More is no record of a trace."""


def json_elements(path: Path, report: Report) -> Iterator[tuple[int, Any]]:
    """The line on which each element of the list begins, and the element.

    A file that is no list, or breaks off, is reported where that shows; nothing is read beyond.
    """
    with open_bytes(path) as file:
        reader = _Reader(file)
        try:
            if not reader.take("["):
                report(Problem(line=reader.line, field="", message="is no JSON list"))
                return
            while not reader.take("]"):
                line = reader.line
                yield line, reader.element()
                if not reader.take(",") and not reader.sees("]"):
                    report(Problem(line=reader.line, field="", message="lacks a comma or the ]"))
                    return
        except (ValueError, RecursionError, EOFError, OSError) as error:
            message = f"is no JSON from here on: {error}"
            report(Problem(line=reader.line, field="", message=message))


class _Reader:
    """A piece of the file, refilled as it is used up. `line` is that of the next character."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = json.JSONDecoder()
        self._characters = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = ""
        self._at = 0
        self._is_over = False
        self.line = 1

    def sees(self, character: str) -> bool:
        """Whether this is the next character that is no space."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._pass(1)
            if self._at < len(self._text):
                return self._text[self._at] == character
            if not self._more():
                return False

    def take(self, character: str) -> bool:
        """The same; and if so, go beyond it."""
        found = self.sees(character)
        if found:
            self._pass(1)
        return found

    def element(self) -> Any:
        """The value that begins here.

        Raises:
            ValueError: there is none, or it is too long.
        """
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > ELEMENT_CHARACTERS_MAX:
                    raise ValueError("an element is longer than 16 MiB") from error
                if not self._more():
                    raise ValueError(error.msg) from None
                continue
            # A number may go on in the next piece.
            if end < len(self._text) or not self._more():
                self._pass(end - self._at)
                return value

    def _pass(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _more(self) -> bool:
        """Read on; as much again as is held, so that a long element is not tried too often."""
        if self._is_over:
            return False
        held = self._text[self._at :]
        raw = self._file.read(max(PIECE_CHARACTERS, len(held)))
        self._is_over = not raw
        self._text, self._at = held + self._characters.decode(raw, self._is_over), 0
        return True
