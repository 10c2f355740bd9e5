"""`plexrl config`: checks, shows and documents configuration files."""

from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.terminal.context import Json, print_line, write_json, write_text
from plexrl.cli.terminal.help import CommandGroup

config_app = typer.Typer(
    cls=CommandGroup, help="Check and show configuration files.", no_args_is_help=True
)
ConfigFile = Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file.")]


@config_app.command("check")
def check(file: ConfigFile, as_json: Json = False) -> None:
    """Check a file of `plexrl up --config` or `plexrl node join --config`: all problems at once."""
    from plexrl.cluster.config.file import is_node_file, read_cluster_file, read_node_file

    is_node = is_node_file(file)
    (read_node_file if is_node else read_cluster_file)(file)
    kind = "node" if is_node else "cluster"
    if as_json:
        write_json({"file": str(file), "kind": kind, "problems": []})
    else:
        print_line(f"{file} is a valid file of a {kind}.")


@config_app.command("show")
def show(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A TOML file; absent: the defaults.")
    ] = None,
    node: Annotated[
        bool, typer.Option("--node", help="Without a file: the defaults of a node.")
    ] = False,
) -> None:
    """Print every setting with its effective value as TOML. Secrets are hidden."""
    from plexrl.cluster.config.file import checked_tables, is_node_file
    from plexrl.cluster.config.reference import effective
    from plexrl.cluster.config.schema import CLUSTER_FILE, NODE_FILE

    is_node = node if file is None else is_node_file(file)
    sections = NODE_FILE if is_node else CLUSTER_FILE
    tables = {} if file is None else checked_tables(file, sections)
    write_text(effective(tables, sections))


@config_app.command("reference")
def reference() -> None:
    """Print the page about all settings, in Markdown."""
    from plexrl.cluster.config.reference import reference

    write_text(reference())
