"""Groups of commands: their help, their imports, and the bounds of their commands' numbers."""

from collections.abc import Iterator, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, ClassVar

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from plexrl.cli.terminal.option_groups import option_name
from plexrl.limits import LIMITS
from plexrl.process.extras import missing_packages, unusable_package

EXTRAS = {
    **dict.fromkeys(("simulate", "simulate-rollout", "plan-rollout"), "simulator"),
    **dict.fromkeys(("allocate-rollout", "fidelity", "forecast"), "simulator"),
    "up": "server,worker",
    "node": "worker",
    "statemanager": "worker",
}
"""The extras that have a command's packages, by its first word; `all` for other commands."""
HELP_MAX = 1000
"""Most characters of a command's description in the help of its group."""


class CommandGroup(TyperGroup):
    """Shows the whole first sentence of each command, which the library would truncate. Checks the
    numbers of a command by `LIMITS` before the command runs."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command, its name and its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        path, parent = [str(name)], ctx
        while parent.parent is not None:
            path.insert(0, str(parent.info_name))
            parent = parent.parent
        _check_first(command, " ".join(("plexrl", *path)))
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands section."""
        known = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, found.get_short_help_str(HELP_MAX)) for name, found in known if found]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


Panels = Mapping[str, Mapping[str, tuple[str, str]]]
"""Of each panel of the help the commands: name, `module:attribute` in `plexrl.cli`, and the first
sentence of the command's help."""


class ImportedCommands(Mapping[str, Any]):
    """Commands by name. Each is imported when it is first asked for."""

    def __init__(self, panels: Panels) -> None:
        rows = [row for panel in panels.values() for row in panel.items()]
        self._sources = {name: source for name, (source, _) in rows}
        self._commands: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._commands:
            self._commands[name] = _imported(name, self._sources[name])
        return self._commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def _imported(name: str, source: str) -> Any:
    """The command or the group of commands in `module:attribute`."""
    module, _, attribute = source.partition(":")
    found = getattr(import_module(f"plexrl.cli.{module}"), attribute)
    holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name, cls=PanelCommand)(found)
    return typer.main.get_group(holder).commands[name]


class PanelGroup(CommandGroup):
    """Commands in panels. Help and completion import none of them."""

    PANELS: ClassVar[Panels] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = ImportedCommands(self.PANELS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel."""
        del ctx
        for title, rows in self.PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in rows.items()])

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Names of commands that begin like this, or options."""
        rows = [row for panel in self.PANELS.values() for row in panel.items()]
        described = [TyperCommand(name, help=text) for name, (_, text) in rows]
        group = TyperGroup(name=self.name, commands=described, params=self.params)
        return group.shell_complete(type(ctx)(group, resilient_parsing=True), incomplete)


def _check_first(command: Any, path: str) -> None:
    run, limits = command.callback, LIMITS.get(path, {})
    if run is None or hasattr(run, "is_checked"):
        return

    @wraps(run)
    def checked(**values: Any) -> Any:
        for name in limits.keys() & values.keys():
            limits[name].check(option_name(name), values[name])
        try:
            return run(**values)
        except ImportError as error:
            package = (error.name or "plexrl").partition(".")[0]
            if package == "plexrl":
                raise
            extras = EXTRAS.get(path.split()[1], "all")
            if isinstance(error, ModuleNotFoundError):
                raise missing_packages(path, package, extras) from error
            raise unusable_package(path, package, str(error), extras) from error

    checked.is_checked = True  # type: ignore[attr-defined]  # the same command may be resolved again
    command.callback = checked


class PanelCommand(TyperCommand):
    """A command with many options, grouped by panel in its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel; options without a panel come last."""
        panels: dict[str, list[tuple[str, str]]] = {}
        rest: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                panels.setdefault("Arguments", []).append(record)
            else:
                panel = getattr(parameter, "rich_help_panel", None)
                (panels.setdefault(panel, []) if panel else rest).append(record)
        for title, rows in (*panels.items(), ("Options", rest)):
            with formatter.section(title):
                formatter.write_dl(rows)


class ListGroup(CommandGroup):
    """A group that runs its command `list` if no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Treat arguments without a command name as arguments of `list`."""
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)
