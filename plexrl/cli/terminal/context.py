"""What the commands share: which cluster is meant, and how its answers are shown."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from plexrl.cli.terminal.tables import table_lines, wrapped
from plexrl.cluster.data_dir import DATA_DIR as DATA_DIR
from plexrl.cluster.data_dir import data_dir_at
from plexrl.errors import ConnectionLostError
from plexrl.process.plain_text import many_lines, one_line

if TYPE_CHECKING:
    from rich.text import Text

    from plexrl.client import Cluster

PATIENCE_S = 5.0
"""A person at a terminal would rather hear that nobody answers."""
GIB = 1 << 30

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Url = Annotated[str | None, typer.Option(help="The cluster's URL.", envvar="PLEXRL_URL")]
Key = Annotated[
    str | None, typer.Option(help="The API key.", envvar="PLEXRL_API_KEY", show_envvar=True)
]
DataDir = Annotated[
    Path, typer.Option(help="Data directory of a local cluster.", envvar="PLEXRL_DATA_DIR")
]


def data_dir_option(path: Path) -> Path:
    """The data directory's absolute path."""
    return data_dir_at(path)


def open_cluster(url: str | None, api_key: str | None, data_dir: Path) -> "Cluster":
    """The cluster at `url`, or the local one that runs on `data_dir`.

    Raises:
        ConnectionLostError: no URL was given and no local cluster runs.
    """
    from plexrl.client import connect
    from plexrl.cluster.endpoint import read_endpoint

    if url is None:
        folder = data_dir_option(data_dir)
        endpoint = read_endpoint(folder)
        if endpoint is None:
            raise ConnectionLostError(
                f"no cluster runs on {folder}: start one with `plexrl up`, or set PLEXRL_URL"
            )
        url, api_key = endpoint.url, api_key or endpoint.api_key
    return connect(url, api_key, timeout_s=PATIENCE_S)


class Output:
    """Prints tables for people, JSON for programs."""

    def __init__(self, as_json: bool) -> None:
        self.is_json = as_json

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], found: Any
    ) -> None:
        """`rows` as a table, or `found` as JSON."""
        if self.is_json:
            write_json(found)
            return
        print_table(title, columns, rows)


# All output of the command line passes through the functions below. They show what controls a
# terminal as escapes: names, reasons and logs are written by tenants.


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table, under a title where there is one, that fits the terminal
    (`plexrl.cli.terminal.tables`)."""
    texts = [[one_line("" if cell is None else str(cell)) for cell in row] for row in rows]
    head = ["", one_line(title)] if title else []
    for line in [*head, *table_lines(columns, texts, terminal_width())]:
        sys.stdout.write(line + "\n")


def plain_cell(text: str) -> "Text":
    """`text` for a table, on one line."""
    from rich.text import Text

    return Text(one_line(text))


def print_line(text: str) -> None:
    """One paragraph: at a terminal on as many lines as it needs, else on one."""
    _write_paragraph(sys.stdout, text)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Characters of a line of the terminal, or as `COLUMNS` says; absent where a program or a file
    reads the output."""
    is_said = bool(os.environ.get("COLUMNS"))
    if is_said or (stream or sys.stdout).isatty():
        return shutil.get_terminal_size().columns
    return None


def _write_paragraph(stream: TextIO, text: str) -> None:
    width = terminal_width(stream)
    lines = [one_line(text)] if width is None else wrapped(one_line(text), width)
    stream.write("".join(line + "\n" for line in lines))


def write_json(found: Any) -> None:
    """One line of JSON for programs, in ASCII."""
    sys.stdout.write(json.dumps(found) + "\n")


def write_text(text: str) -> None:
    """Lines as they are, such as those of a log."""
    sys.stdout.write(many_lines(text))


def warn(text: str) -> None:
    """One paragraph on standard error, as `print_line` writes one."""
    _write_paragraph(sys.stderr, text)


def warn_lines(text: str) -> None:
    """Lines on standard error, such as the faults of a file."""
    sys.stderr.write(many_lines(text) + "\n")


def local_time(at: float | None) -> str:
    """Seconds since the epoch as this machine's time; nothing where it is not known."""
    if at is None:
        return ""
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")


def seconds(value: float | None) -> str:
    """A span of time for people; nothing where it is not known."""
    if value is None:
        return ""
    if abs(value) < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
