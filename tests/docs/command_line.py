"""What `plexrl` accepts, asked of the parser that it runs with."""

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from plexrl.cli.app import app

# Typer brings a Click of its own, whose module has another name from release to release.
ROOT_COMMAND: Any = typer.main.get_command(app)


def resolve(words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """(the command that the words name, `plexrl` first; the words after its name).

    Raises:
        KeyError: there is no such command.
    """
    command, left = ROOT_COMMAND, list(words[1:])
    while hasattr(command, "commands") and left and not left[0].startswith("-"):
        # Asked to be lenient, a group answers None for an unknown command.
        context = command.context_class(command, resilient_parsing=True)
        _, found, rest = command.resolve_command(context, left)
        if found is None:
            raise KeyError(left[0])
        command, left = found, rest
    return command, left


def parse(words: Sequence[str]) -> None:
    """Parse a whole command line and run nothing.

    Raises:
        KeyError: there is no such command.
        Exception: Click's own, where an option or a value is not accepted.
    """
    command, left = resolve(words)
    command.make_context(command.name, list(left))


def options_of(command: Any) -> Iterator[str]:
    """The options of one command."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    yield "--help"


def all_options(command: Any = ROOT_COMMAND) -> set[str]:
    """Those of a command and of all below it."""
    found = set(options_of(command))
    for child in getattr(command, "commands", {}).values():
        found |= all_options(child)
    return found
