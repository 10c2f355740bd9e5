"""The packages of PlexRL's extras: which of them are missing here."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

from plexrl.errors import UnavailableError

NAME = re.compile(r"[\w.-]+")


def check_extras(what: str, *extras: str) -> None:
    """Refuse to begin what needs packages of these extras that are not installed.

    Raises:
        UnavailableError: it names the packages, and how to install them.
    """
    missing = dict.fromkeys(name for name in _packages(extras) if not _is_installed(name))
    if missing:
        raise missing_packages(what, ", ".join(missing), *extras)


def missing_packages(what: str, packages: str, *extras: str) -> UnavailableError:
    """The error of something that needs packages of these extras."""
    return UnavailableError(
        f"{what} needs {packages}, not installed here: pip install 'plexrl[{','.join(extras)}]'"
    )


def unusable_package(what: str, package: str, why: str, *extras: str) -> UnavailableError:
    """The error of something that needs a package, which is installed and cannot be imported: of
    another version, or without a library of the system."""
    return UnavailableError(
        f"{what} needs {package}, which cannot be imported here ({why}): "
        f"pip install --upgrade 'plexrl[{','.join(extras)}]'"
    )


def _packages(extras: tuple[str, ...]) -> Iterator[str]:
    """Names of the packages; none if PlexRL itself was not installed by pip."""
    try:
        found = requires("plexrl") or []
    except PackageNotFoundError:
        return
    for requirement in found:
        package, _, marker = requirement.partition(";")
        name = NAME.match(package)
        if name and any(f'extra == "{extra}"' in marker.replace("'", '"') for extra in extras):
            yield name.group()


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
