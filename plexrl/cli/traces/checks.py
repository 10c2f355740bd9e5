"""What `plexrl traces` checks before it works: options without effect, and where to write.

An option that would be ignored is an error: the user expects that it counts.
"""

import os
from collections.abc import Mapping
from math import isfinite
from pathlib import Path

import typer

from plexrl.errors import InvalidRequestError

_LEFT_OUT = frozenset({"DEFAULT", "DEFAULT_MAP"})

DAYS_MAX = 11_574
"""Of a trace, whose times are at most 1e9 seconds."""

SUFFIXES = (".csv", ".csv.gz", ".parquet")


def given_options(context: typer.Context) -> frozenset[str]:
    """The parameters that the command line or the environment sets."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return frozenset(
        name for name, source in sources if source is not None and source.name not in _LEFT_OUT
    )


def refuse(given: frozenset[str], ignored: Mapping[str, str], because: str) -> None:
    """That none of the options is given which `ignored` names, by parameter.

    Raises:
        InvalidRequestError: some are; they would have no effect, and `because` says why.
    """
    idle = [flag for name, flag in ignored.items() if name in given]
    if idle:
        raise InvalidRequestError(
            f"{', '.join(idle)} would have no effect: {because}; leave {_them(idle)} away"
        )


def check_amounts(**amounts: float | None) -> None:
    """That each number is one that can be reckoned with, above 0 unless it is a minimum, and that
    days are no more than a trace can have.

    Raises:
        InvalidRequestError: one is not; which is said.
    """
    for name, value in amounts.items():
        if value is not None and name.endswith("days") and value > DAYS_MAX:
            raise InvalidRequestError(
                f"--{name.replace('_', '-')} is at most {DAYS_MAX:,}, not {value:g}: no trace has "
                "later times"
            )
        least = 0.0 if name.startswith("min_") else None
        if value is None or (isfinite(value) and (value > 0 or value == least)):
            continue
        wanted = "at least 0" if least is not None else "more than 0"
        raise InvalidRequestError(f"--{name.replace('_', '-')} is {wanted}, not {value:g}")


def check_out(
    out: Path,
    source: str | None = None,
    suffixes: tuple[str, ...] = SUFFIXES,
    to_be_made: Path | None = None,
) -> None:
    """Before anything is read: the file can be written. One that is there will be replaced.
    `to_be_made`: a folder that need not be there.

    Raises:
        InvalidRequestError: its name is of no kind that is written, it is a folder, its folder is
            not there or not to be written, or it is the file that is read.
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


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
