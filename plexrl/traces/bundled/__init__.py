"""Traces that are shipped with the package; sources in `ATTRIBUTION.md`."""

from pathlib import Path

from plexrl.errors import InvalidRequestError

PREFIX = "bundled:"

FILES = {
    "philly": "philly_2017-09_to_2017-11.csv.gz",
    "mixed-sizes": "mixed_sizes_seed1.csv",
    "azure-conversation": "lengths_azure_2023_conversation.csv.gz",
    "r1-lengths": "lengths_deepseek_r1_histogram.csv",
}


def bundled(name: str) -> Path:
    """The file of a bundled trace.

    Raises:
        InvalidRequestError: the name is unknown.
    """
    if name not in FILES:
        raise InvalidRequestError(f"no bundled trace {name!r}: use {', '.join(FILES)}")
    return Path(__file__).parent / FILES[name]


def path_of(name: str) -> Path:
    """The file of a path or of `bundled:NAME`."""
    return bundled(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else Path(name)
