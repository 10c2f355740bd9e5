"""Checks of `plexrl traces` before it reads: options without effect, and the output file.

An option without effect is an error, because the user expects one.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plexrl.cli.terminal.option_groups import option_name
from plexrl.errors import InvalidRequestError

SUFFIXES = (".csv", ".csv.gz", ".parquet")


def refuse(given: Mapping[str, Any], ignored: Iterable[str], because: str) -> None:
    """Refuse options without effect. `ignored`: their parameters.

    Raises:
        InvalidRequestError: an option in `ignored` is given; the message has `because`.
    """
    idle = [option_name(name) for name in ignored if name in given]
    if idle:
        them = "it" if len(idle) == 1 else "them"
        raise InvalidRequestError(f"{', '.join(idle)} would have no effect: {because}; omit {them}")


def check_out(
    out: Path,
    source: str | None = None,
    suffixes: tuple[str, ...] = SUFFIXES,
    to_be_made: Path | None = None,
) -> None:
    """Check that the file can be written; an existing file will be replaced. `to_be_made`: a folder
    that the command creates.

    Raises:
        InvalidRequestError: the suffix is unknown, the path is a folder, its folder is missing or
            not writable, or it is the input file.
    """
    if not out.name.lower().endswith(suffixes):
        raise InvalidRequestError(f"{out}: name a file {' or '.join(f'*{s}' for s in suffixes)}")
    if out.is_dir():
        raise InvalidRequestError(f"{out} is a folder: name a file in it")
    folder = out.absolute().parent
    if not folder.exists() and to_be_made is not None and folder == to_be_made.absolute():
        return
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "is not there: make it first"
        raise InvalidRequestError(f"{out} cannot be written: {folder} {what}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidRequestError(f"{out} cannot be written: {folder} is not yours to write")
    if source is not None and out.exists() and _is_same(out, Path(source)):
        raise InvalidRequestError(f"{out} is the file that is read: name another for the result")


def _is_same(out: Path, source: Path) -> bool:
    return source.exists() and out.samefile(source)
