"""Options of commands: groups of them as dataclasses, and those that the user has given."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer: each parameter that is a dataclass becomes one option per field.

    The fields of a group have the annotations and defaults of typer parameters. The order of the
    options is the order of the parameters and, within a group, of the fields. The class attribute
    `PANEL` of a group, if any, is the section of the help that lists its options.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _options(hints[name])
        else:
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))

    def grouped(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    # Options without defaults come first in a signature; typer calls by keyword.
    parameters.sort(key=lambda each: each.default is not inspect.Parameter.empty)
    grouped.__name__, grouped.__doc__ = command.__name__, command.__doc__
    grouped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    grouped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return grouped


def given_options(context: typer.Context) -> dict[str, object]:
    """The parameters that the command line sets, by name."""
    return {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    }


def option_name(parameter: str) -> str:
    """The command-line option of a parameter."""
    names = {"layout": "from", "as_json": "json"}
    return "--" + names.get(parameter, parameter).replace("_", "-")


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    panel = getattr(group, "PANEL", None)
    for field in fields(group):
        for option in getattr(hints[field.name], "__metadata__", ()):
            option.rich_help_panel = panel or option.rich_help_panel
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(group)
    ]
