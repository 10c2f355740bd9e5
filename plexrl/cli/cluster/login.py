"""`plexrl login` and `plexrl logout`: commands in the name of a user of an identity provider."""

from typing import Annotated

import typer

from plexrl import logins
from plexrl.cli.terminal.context import print_line

Url = Annotated[str, typer.Argument(help="The cluster's URL, as in PLEXRL_URL.")]
CaFile = Annotated[
    str | None,
    typer.Option(
        help="PEM file of the authority of the URL's certificate.", envvar="PLEXRL_CA_FILE"
    ),
]


def login(url: Url, ca_file: CaFile = None) -> None:
    """Log in on a cluster in a browser; commands without an API key then act in your name."""
    made = logins.log_in(url, _show, ca=ca_file)
    print_line(f"Logged in. The login is in {logins.store(made)}; plexrl logout {url} ends it.")


def logout(url: Url) -> None:
    """End the login on a cluster."""
    print_line("Logged out." if logins.forget(url) else f"There is no login at {url}.")


def _show(address: str, code: str) -> None:
    print_line(f"Open {address} in a browser, and compare the code: {code}")
