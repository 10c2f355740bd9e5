"""Secrets do not belong into arguments: every user of a machine can read those of all processes."""

import sys
from pathlib import Path
from urllib.parse import urlsplit

from plexrl.errors import InvalidRequestError


def exposed(what: str, instead: str) -> InvalidRequestError:
    """The error for a secret that was given as an argument; `what` says where, without the secret,
    and `instead` how to give it."""
    return InvalidRequestError(
        f"{what}, and every user of this machine can read the arguments of processes: {instead}; "
        "change a secret that others may have read"
    )


def check_url(name: str, text: str, instead: str) -> None:
    """Refuse a URL with a user or a password.

    Raises:
        InvalidRequestError: it has one, or may have one. The message does not repeat the URL.
    """
    for url in text.split(","):
        try:
            authority = urlsplit(url).netloc or url
        except ValueError:
            authority = url
        if "@" in authority:
            raise exposed(f"{name} holds a user or a password", instead)


def read_secret(name: str, path: Path) -> str:
    """The secret in a file, or on standard input for `-`, without the white space around it.

    Raises:
        InvalidRequestError: it cannot be read, or is empty.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{name} {path} cannot be read: {error}") from error
    if not text.strip():
        raise InvalidRequestError(f"{name} {path} is empty: write the secret into it")
    return text.strip()
