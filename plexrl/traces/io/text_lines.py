"""Reads the lines of a text file and splits each into cells.

Cells never contain line ends, so a stray quote affects its own line only, and memory is bounded by
the longest line.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from plexrl.errors import InvalidRequestError
from plexrl.traces.io.problems import Problem, Report

LINE_BYTES_MAX = 1 << 20


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading; `.gz` files are decompressed.

    Raises:
        InvalidRequestError: it cannot be opened.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    if path.suffix != ".gz":
        return raw
    raw.close()
    return gzip.open(path, "rb")  # type: ignore[return-value]  # it reads like a file


def lines(path: Path, report: Report) -> Iterator[tuple[int, str]]:
    """Number and text of each non-blank line. Bytes that are not UTF-8 become lone surrogates."""
    with open_bytes(path) as file:
        number = 0
        try:
            while raw := file.readline(LINE_BYTES_MAX):
                number += 1
                if len(raw) == LINE_BYTES_MAX and not raw.endswith(b"\n"):
                    _skip_line(file)
                    report(Problem(line=number, field="", message="is longer than 1 MiB"))
                    continue
                text = raw.decode("utf-8", "surrogateescape").rstrip("\r\n")
                if number == 1:
                    text = text.removeprefix("\ufeff")
                if text.strip():
                    yield number, text
        except (EOFError, OSError, zlib.error) as error:
            message = f"cannot be read further: {error}"
            report(Problem(line=number + 1, field="", message=message))


def split_cells(text: str) -> list[str]:
    """The cells of a line of CSV.

    Raises:
        ValueError: its quotes do not match.
    """
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except (csv.Error, StopIteration) as error:
        raise ValueError(f"is not a line of CSV: {error}") from error


def cells(path: Path, report: Report) -> Iterator[tuple[int, list[str]]]:
    """Number and cells of each non-blank line of a CSV file."""
    for number, text in lines(path, report):
        try:
            yield number, split_cells(text)
        except ValueError as error:
            report(Problem(line=number, field="", message=str(error)))


def _skip_line(file: IO[bytes]) -> None:
    while chunk := file.readline(LINE_BYTES_MAX):
        if chunk.endswith(b"\n"):
            return
