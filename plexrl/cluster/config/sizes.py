"""Amounts of memory as text."""

import re

from plexrl.errors import InvalidRequestError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """Parse `64GiB`, `1.5 TiB` or `4096` into bytes.

    Raises:
        InvalidRequestError: the text is not a size.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].upper() not in _UNITS:
        raise InvalidRequestError(f"{text!r} is not a size: write it as 64GiB, 512MiB or 4096")
    return round(float(found[1]) * _UNITS[found[2].upper()])
