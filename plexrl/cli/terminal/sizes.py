"""Parses and formats amounts of memory."""

import typer

from plexrl.cluster.config.sizes import parse_size
from plexrl.errors import InvalidRequestError


def byte_size(text: str) -> int:
    """Parse `64GiB`, `1.5 TiB` or `4096` into bytes.

    Raises:
        typer.BadParameter: the text is not a size.
    """
    try:
        return parse_size(text)
    except InvalidRequestError as error:
        raise typer.BadParameter(error.message) from error


def memory_size(text: str) -> int:
    """As `byte_size`, but a number without a unit is GiB."""
    is_number = text.strip().replace(".", "", 1).isdecimal()
    return byte_size(f"{text}GiB" if is_number else text)


def size_text(nbytes: int) -> str:
    """Bytes as text, such as `1.5 GiB`."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} B"
