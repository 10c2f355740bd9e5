"""Options for secrets, which a command takes from a file, standard input or the environment."""

from pathlib import Path
from typing import Any

import typer

from plexrl.cli.terminal.option_groups import option_name
from plexrl.secret_arguments import check_url, exposed, read_secret


def secret_option(variable: str) -> Any:
    """A secret from this environment variable. The option of its name is refused, and hidden: it
    exists so that its users learn how to give the secret."""

    def refuse(
        context: typer.Context, parameter: typer.CallbackParam, value: str | None
    ) -> str | None:
        if _is_argument(context, parameter):
            option = option_name(str(parameter.name))
            raise exposed(
                f"{option} is a secret",
                f"set {variable}, or write it into a file and give {option}-file PATH (- for "
                "standard input)",
            )
        return value

    return typer.Option(envvar=variable, hidden=True, callback=refuse)


def secret_file_option(what: str, variable: str) -> Any:
    """The file with the secret, in place of the environment variable."""
    text = f"File with {what}, - for standard input. Or set {variable}."
    return typer.Option(metavar="PATH", help=text)


def chosen_secret(parameter: str, file: Path | None, secret: str | None) -> str | None:
    """The secret in the file, or else that of the environment. Raises `InvalidRequestError`."""
    return secret if file is None else read_secret(f"{option_name(parameter)}-file", file)


def url_option(text: str, variable: str) -> Any:
    """A URL of the API, which may not hold a password."""

    def check(
        context: typer.Context, parameter: typer.CallbackParam, value: str | None
    ) -> str | None:
        if value is not None and _is_argument(context, parameter):
            check_url(
                f"the URL of {option_name(str(parameter.name))}",
                value,
                f"leave them out, or set {variable} to the URL",
            )
        return value

    return typer.Option(help=text, envvar=variable, callback=check)


def _is_argument(context: typer.Context, parameter: typer.CallbackParam) -> bool:
    source = context.get_parameter_source(str(parameter.name))
    return source is not None and source.name == "COMMANDLINE"
