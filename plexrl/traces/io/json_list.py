"""Streams the elements of a file that is one long JSON list.

Memory holds one chunk of the file and one element.
"""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from plexrl.traces.io.problems import Problem, Report
from plexrl.traces.io.text_lines import open_bytes

CHUNK_CHARACTERS = 1 << 20
ELEMENT_CHARACTERS_MAX = 1 << 24
"""Longest element; no record of a trace is longer."""


def json_elements(path: Path, report: Report) -> Iterator[tuple[int, Any]]:
    """The first line of each element of the list, and the element.

    A file that is not a list or is truncated is reported with its line; reading stops there.
    """
    with open_bytes(path) as file:
        reader = _Reader(file)
        try:
            if not reader.take("["):
                report(Problem(line=reader.line, field="", message="is not a JSON list"))
                return
            while not reader.take("]"):
                line = reader.line
                yield line, reader.element()
                if not reader.take(",") and not reader.sees("]"):
                    report(Problem(line=reader.line, field="", message="lacks a comma or the ]"))
                    return
        except (ValueError, RecursionError, EOFError, OSError) as error:
            message = f"is not valid JSON from here on: {error}"
            report(Problem(line=reader.line, field="", message=message))


class _Reader:
    """A chunk of the file, refilled on demand. `line`: line number of the next character."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = json.JSONDecoder()
        self._characters = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = ""
        self._at = 0
        self._is_over = False
        self.line = 1

    def sees(self, character: str) -> bool:
        """Whether this is the next character after white space."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._pass(1)
            if self._at < len(self._text):
                return self._text[self._at] == character
            if not self._more():
                return False

    def take(self, character: str) -> bool:
        """Consume the next character after white space if it is this one."""
        found = self.sees(character)
        if found:
            self._pass(1)
        return found

    def element(self) -> Any:
        """Parse the next value.

        Raises:
            ValueError: the value is invalid or too long.
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
            # A number may continue in the next chunk.
            if end < len(self._text) or not self._more():
                self._pass(end - self._at)
                return value

    def _pass(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _more(self) -> bool:
        """Read another chunk, at least as long as the rest, so that long elements parse in few
        tries."""
        if self._is_over:
            return False
        held = self._text[self._at :]
        raw = self._file.read(max(CHUNK_CHARACTERS, len(held)))
        self._is_over = not raw
        self._text, self._at = held + self._characters.decode(raw, self._is_over), 0
        return True
