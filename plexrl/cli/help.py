"""Groups of commands, and how their help shows them."""

from typing import Any

from typer.core import TyperGroup

HELP_MAX = 1000
"""Characters of a command's line in the help of its group, which goes over several lines."""


class CommandGroup(TyperGroup):
    """Tells of each command its whole first sentence, where the library would cut it off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section of the commands."""
        known = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, found.get_short_help_str(HELP_MAX)) for name, found in known if found]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class ListGroup(CommandGroup):
    """A group that is its command `list` where no command is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what is no command's name for what is to be listed."""
        if not args or args[0] not in (*self.commands, "--help"):
            args = ["list", *args]
        return super().parse_args(ctx, args)
