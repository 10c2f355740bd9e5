"""Shared parts of the commands: connecting to a cluster, and output."""

import csv
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from plexrl.cli.terminal.secret_options import (
    chosen_secret,
    secret_file_option,
    secret_option,
    url_option,
)
from plexrl.cli.terminal.tables import table_lines, wrapped
from plexrl.cluster.data_dir.folder import DATA_DIR as DATA_DIR
from plexrl.cluster.data_dir.folder import data_dir_at
from plexrl.errors import ConnectionLostError, InvalidRequestError
from plexrl.process.plain_text import csv_text, many_lines, one_line

if TYPE_CHECKING:
    from rich.text import Text

    from plexrl.client.blocking.cluster import Cluster

TIMEOUT_S = 5.0
"""Request timeout of interactive commands."""
GIB = 1 << 30
KEY_VARIABLE = "PLEXRL_API_KEY"

Cells = Mapping[str, str | Callable[[Any], Any]]
"""By heading of the column: the field of the record, or a function of the record."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[
    Path, typer.Option(help="Data directory of a local cluster.", envvar="PLEXRL_DATA_DIR")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The options by which a command finds its cluster."""

    url: Annotated[str | None, url_option("The cluster's URL.", "PLEXRL_URL")] = None
    api_key: Annotated[str | None, secret_option(KEY_VARIABLE)] = None
    api_key_file: Annotated[Path | None, secret_file_option("the API key", KEY_VARIABLE)] = None
    ca_file: Annotated[
        str | None,
        typer.Option(
            help="PEM file of the authority of an https:// URL's certificate.",
            envvar="PLEXRL_CA_FILE",
        ),
    ] = None
    data_dir: DataDir = DATA_DIR

    def open(self) -> "Cluster":
        """Connect to the cluster at `url`, or to the local cluster on `data_dir`.

        Raises:
            ConnectionLostError: there is neither a URL nor a local cluster.
            InvalidRequestError: the file with the API key cannot be read.
            AuthenticationError: the user's login has ended.
        """
        from plexrl.client.blocking.cluster import connect
        from plexrl.cluster.data_dir.endpoint import read_endpoint
        from plexrl.cluster.data_dir.logins import stored_token

        url, ca = self.url, self.ca_file
        api_key = chosen_secret("api_key", self.api_key_file, self.api_key)
        if url is not None and api_key is None:
            api_key = stored_token(url)
        if url is None:
            folder = data_dir_at(self.data_dir)
            endpoint = read_endpoint(folder)
            if endpoint is None:
                raise ConnectionLostError(
                    f"no cluster runs on {folder}: start one with `plexrl up`, or set PLEXRL_URL"
                )
            url, api_key, ca = endpoint.url, api_key or endpoint.api_key, ca or endpoint.ca
        return connect(url, api_key, ca=ca, timeout_s=TIMEOUT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The option that chooses between tables for people and JSON for programs."""

    as_json: Json = False

    def table(
        self, cells: Cells, records: Sequence[Any], found: Any = None, *, title: str = ""
    ) -> None:
        """Print the records as a table, or `found` (default: the records) as JSON."""
        if self.as_json:
            write_json(records if found is None else found)
        else:
            print_records(title, cells, records)


ShowKey = Annotated[
    bool,
    typer.Option("--show-key", help="Print the secret although the output is no terminal."),
]


def check_shown(*, show_key: bool) -> None:
    """Refuse to print a secret to a stream that is no terminal and may be kept in a log, unless the
    user asks for it. Raises `InvalidRequestError`; call it before the secret is made."""
    if not show_key and not sys.stdout.isatty():
        raise InvalidRequestError(
            "this command prints a secret, and its output is no terminal, so that a log may keep "
            "it: add --show-key, and send the output where only you can read it"
        )


# All output of the command line passes through the functions below. They escape control characters,
# because tenants choose names, reasons and logs.


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table that fits the terminal (`plexrl.cli.terminal.tables`), with an optional
    title."""
    texts = [[one_line("" if cell is None else str(cell)) for cell in row] for row in rows]
    head = ["", one_line(title)] if title else []
    for line in [*head, *table_lines(columns, texts, terminal_width())]:
        sys.stdout.write(line + "\n")


def print_records(title: str, cells: Cells, records: Iterable[Any]) -> None:
    """Print a table with one row for each record."""
    readers = [cell if callable(cell) else itemgetter(cell) for cell in cells.values()]
    print_table(title, tuple(cells), ([read(record) for read in readers] for record in records))


def plain_cell(text: str) -> "Text":
    """`text` as a table cell on one line."""
    from rich.text import Text

    return Text(one_line(text))


def styled_line(parts: Iterable[tuple[str, str]]) -> "Text":
    """Texts with their styles, on one line."""
    from rich.text import Text

    return Text.assemble(*((one_line(text), style) for text, style in parts))


def print_line(text: str) -> None:
    """Print one paragraph, wrapped at a terminal and on one line otherwise."""
    _write_paragraph(sys.stdout, text)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Width of the terminal in characters, or `COLUMNS`; None if the output is a pipe or a file."""
    is_set = bool(os.environ.get("COLUMNS"))
    if is_set or (stream or sys.stdout).isatty():
        return shutil.get_terminal_size().columns
    return None


def _write_paragraph(stream: TextIO, text: str) -> None:
    width = terminal_width(stream)
    lines = [one_line(text)] if width is None else wrapped(one_line(text), width)
    stream.write("".join(line + "\n" for line in lines))


def write_json(found: Any) -> None:
    """Print one line of JSON in ASCII."""
    sys.stdout.write(json.dumps(found) + "\n")


def write_text(text: str) -> None:
    """Print lines unchanged, such as those of a log."""
    sys.stdout.write(many_lines(text))


def write_csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows as CSV with a header; spreadsheets take no text in it for a formula."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in (columns, *rows):
        writer.writerow([csv_text(cell) if isinstance(cell, str) else cell for cell in row])
    write_text(text.getvalue())


def warn(text: str) -> None:
    """Print one paragraph on standard error, like `print_line`."""
    _write_paragraph(sys.stderr, text)


def warn_lines(text: str) -> None:
    """Print lines on standard error, such as the faults of a file."""
    sys.stderr.write(many_lines(text) + "\n")


def local_time(at: float | None) -> str:
    """Seconds since the epoch as local time; empty if unknown."""
    if at is None:
        return ""
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")


def seconds(value: float | None) -> str:
    """A duration as text; empty if unknown."""
    if value is None:
        return ""
    if abs(value) < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
