"""The commands and options that `plexrl` accepts, read from its own parser."""

from collections.abc import Iterator, Sequence
from typing import Any

import typer

from plexrl.cli.app import app

# Typer includes a copy of Click, whose module name differs between releases.
ROOT_COMMAND: Any = typer.main.get_command(app)


def resolve(words: Sequence[str]) -> tuple[Any, Sequence[str]]:
    """Returns the command that `words` name, and the remaining words. `words[0]` is `plexrl`.

    Raises:
        KeyError: there is no such command.
    """
    command, left = ROOT_COMMAND, list(words[1:])
    while hasattr(command, "commands") and left and not left[0].startswith("-"):
        # A resilient parse returns None for an unknown command.
        context = command.context_class(command, resilient_parsing=True)
        _, found, rest = command.resolve_command(context, left)
        if found is None:
            raise KeyError(left[0])
        command, left = found, rest
    return command, left


def parse(words: Sequence[str]) -> None:
    """Parse a command line without running it.

    Raises:
        KeyError: there is no such command.
        Exception: an error of Click, if an option or a value is not accepted.
    """
    command, left = resolve(words)
    command.make_context(command.name, list(left))


def options_of(command: Any) -> Iterator[str]:
    """Options of one command."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    yield "--help"


def all_options(command: Any = ROOT_COMMAND) -> set[str]:
    """Options of a command and of all its sub-commands."""
    found = set(options_of(command))
    for child in getattr(command, "commands", {}).values():
        found |= all_options(child)
    return found
