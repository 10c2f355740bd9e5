"""Reads the header of a trace file: column names, or the reason why it is not a table.

A fault of the header affects the whole file, so it is an error even if bad rows are skipped.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces.io.json_list import json_elements
from plexrl.traces.io.problems import Problem
from plexrl.traces.io.text_lines import cells, lines, open_bytes
from plexrl.traces.schema import Fault

Kind = Literal["csv", "json lines", "json list", "json object"]

SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
"""Unsupported separators and their names."""

LOOKED_AT_BYTES = 4096

GZIP = b"\x1f\x8b"

BEGINNINGS = (
    (b"PAR1", "a Parquet file: name it *.parquet"),
    (b"PK\x03\x04", "a ZIP archive or an Excel workbook: unpack it, or save the sheet as CSV"),
    (GZIP, "compressed by gzip: name it *.gz, or unpack it"),
    (b"BZh", "compressed by bzip2: unpack it"),
    (b"\xfd7zXZ", "compressed by xz: unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file: run `git lfs pull`"),
    (b"<", "a web page or XML: download the file itself"),
)
"""First bytes of other kinds of file, with advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a file."""

    kind: Kind
    line: int
    """Line number of the names, from 1."""
    names: tuple[str, ...]
    """Column names of a CSV file, or field names of the first JSON object."""


def read_header(path: Path) -> Header:
    """The header of a text file, which may also be a JSON list or object without a header line.

    Raises:
        InvalidRequestError: the file cannot be opened.
        TraceError: the file is empty or not text.
    """
    if path.is_dir():
        raise InvalidRequestError(
            f"{path} is a folder: name a file in it, or a folder of ServeGen's chunk-N-dataset.json"
        )
    first = _beginning(path)
    _check_is_text(path, first)
    text = first.decode("utf-8", "surrogateescape").removeprefix("\ufeff").lstrip()
    if text.startswith("["):
        return _of_list(path)
    if text.startswith("{"):
        return _of_object(path, text)
    ignored: list[Problem] = []
    for line, row in cells(path, ignored.append):
        return Header(kind="csv", line=line, names=tuple(name.strip() for name in row))
    raise empty(path)


def column_faults(header: Header, needed: Iterable[tuple[str, ...]], of: str) -> list[Fault]:
    """Faults of the names. `needed`: required columns, each with its possible names; `of`: the
    layout that requires them."""
    names = header.names
    faults = [
        (name, "is repeated in the header: rename one of the two")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    missing = ["/".join(each) for each in needed if not set(each) & set(names)]
    if missing:
        separator = other_separator(header)
        if separator:
            faults.append(("", f"its cells are separated by {separator}: save it with commas"))
        else:
            faults += [(name, f"is missing from the header; {of} needs it") for name in missing]
    return faults


def other_separator(header: Header) -> str:
    """The name of the separator if it is not a comma, else empty."""
    if header.kind != "csv" or len(header.names) != 1:
        return ""
    counts = {mark: header.names[0].count(mark) for mark in SEPARATORS}
    most = max(counts, key=lambda mark: counts[mark])
    return SEPARATORS[most] if counts[most] else ""


def header_error(path: Path, line: int, faults: Iterable[Fault]) -> TraceError:
    """One error of all faults of a header, which `--skip-bad` does not skip."""
    found = [Problem(line=line, field=field, message=message) for field, message in faults]
    listed = "\n".join(map(str, found))
    return TraceError(
        f"{path}: its header is invalid, so none of its rows can be read\n{listed}",
        path=str(path),
        count=len(found),
        problems=[
            {"line": each.line, "field": each.field, "message": each.message} for each in found
        ],
    )


def empty(path: Path) -> TraceError:
    """The error of a file without a header."""
    return TraceError(
        f"{path} is empty: its first line must name the columns",
        path=str(path),
        count=1,
        problems=[{"line": 0, "field": "", "message": "is empty"}],
    )


def _beginning(path: Path) -> bytes:
    with open_bytes(path) as file:
        try:
            return file.read(LOOKED_AT_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            with path.open("rb") as raw:
                first = raw.read(LOOKED_AT_BYTES)
            # The name suggests compression but the contents are not compressed.
            if not first.startswith(GZIP):
                _check_is_text(path, first)
            raise TraceError(f"{path} cannot be read further: {error}", path=str(path)) from error


def _check_is_text(path: Path, first: bytes) -> None:
    if not first.strip():
        # Only blank bytes at the beginning: treat the file as empty.
        raise empty(path)
    for beginning, what in BEGINNINGS:
        if first.startswith(beginning):
            raise TraceError(f"{path} is not a table: it is {what}", path=str(path))
    if b"\x00" in first.partition(b"\n")[0]:
        raise TraceError(
            f"{path} is not a table but binary, or text in UTF-16: save it as CSV in UTF-8",
            path=str(path),
        )


def _of_list(path: Path) -> Header:
    problems: list[Problem] = []
    for line, value in json_elements(path, problems.append):
        names = tuple(map(str, value)) if isinstance(value, Mapping) else ()
        return Header(kind="json list", line=line, names=names)
    if problems:
        listed = "; ".join(map(str, problems))
        raise TraceError(f"{path} is not a JSON list: {listed}", path=str(path))
    raise InvalidRequestError(f"{path} is an empty JSON list: it has no jobs")


def _of_object(path: Path, text: str) -> Header:
    """One object per line, or one object that is the whole file."""
    first = text.partition("\n")[0]
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        value = _long_line(path) if "\n" not in text else None
    if isinstance(value, dict):
        return Header(kind="json lines", line=1, names=tuple(map(str, value)))
    return Header(kind="json object", line=1, names=())


def _long_line(path: Path) -> object:
    """The value of a first line that is longer than the part read so far."""
    ignored: list[Problem] = []
    for _, line in lines(path, ignored.append):
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None
    return None
