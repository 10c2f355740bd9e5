"""Public traces that may be shipped with the package; `ATTRIBUTION.md` says whose they are."""

from pathlib import Path

from plexrl.errors import InvalidRequestError

PREFIX = "bundled:"

FILES = {
    "philly": "philly_2017-09_to_2017-11.csv.gz",
    "azure-conversation": "lengths_azure_2023_conversation.csv.gz",
    "r1-lengths": "lengths_deepseek_r1_histogram.csv",
}


def bundled(name: str) -> Path:
    """The file of a bundled trace.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    if name not in FILES:
        raise InvalidRequestError(f"no trace {name!r} is bundled: there are {', '.join(FILES)}")
    return Path(__file__).parent / FILES[name]


def path_of(name: str) -> Path:
    """The file that a user means: a path, or `bundled:NAME`."""
    return bundled(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else Path(name)
