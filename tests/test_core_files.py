"""`make test-core` runs every test of the pure cores without torch."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

from tests.core_files import PURE

ROOT = Path(__file__).parents[1]
EXTRAS = {"server", "simulator", "test"}
BARE = """
import sys
from importlib.abc import MetaPathFinder

hidden = set(sys.argv[1].split(","))


class Hides(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)


sys.meta_path.insert(0, Hides())
import pytest

sys.exit(pytest.main(["--core", "--collect-only", "-q", *sys.argv[2:]]))
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(name: str) -> list[str]:
    """What a distribution needs, with markers for its extras."""
    if name != "plexrl":
        return requires(name) or []
    # The metadata of an editable installation are those of its day.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    return [
        *project["dependencies"],
        *(
            f'{line}; extra == "{extra}"'
            for extra, lines in extras
            for line in lines
            if ";" not in line
        ),
    ]


def installed_with(extras: set[str]) -> set[str]:
    """The distributions that come with PlexRL and these extras."""
    found: set[str] = set()
    todo = {("plexrl", frozenset(extras))}
    seen = set(todo)
    while todo:
        name, wanted = todo.pop()
        for line in requirements(name):
            needed = Requirement(line)
            environments = [{"extra": extra} for extra in ("", *wanted)]
            if needed.marker and not any(map(needed.marker.evaluate, environments)):
                continue
            found.add(canonical(needed.name))
            todo |= {(needed.name, frozenset(needed.extras))} - seen
            seen |= todo
    return found


def test_every_test_of_a_core_is_collected_without_further_packages() -> None:
    known = installed_with(EXTRAS) | {"plexrl", "pip", "setuptools"}
    hidden = sorted(
        package
        for package, owners in packages_distributions().items()
        if not {canonical(each) for each in owners} & known
    )
    assert "torch" in hidden
    assert "fastapi" not in hidden
    folders = [f"tests/{name}" for name in PURE]
    done = subprocess.run(
        [sys.executable, "-c", BARE, ",".join(hidden), *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
