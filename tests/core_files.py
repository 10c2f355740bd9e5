"""`--core`: only tests of pure cores and quick shells, which run without torch (`make test-core`).

Such a run looks into `FOLDERS`. It leaves out a file there that imports a package which is not
installed, except in `PURE`: there no file may need more than the extras `server`, `simulator` and
`test`, and one that does fails the run. `test_core_files.py` checks that in each run of the suite.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PURE = ("rollout", "scheduler", "sim", "traces", "wire")
"""Folders of the cores, all of whose files run."""
FOLDERS = (*PURE, "client", "model", "process", "router")
"""Folders of the cores and of shells that need no process of a node."""
OWN = ("benchmarks", "plexrl", "tests")
"""Packages that are there: one of their modules that is missing is a mistake."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the other folders, and tests of the repository as a whole."""
    if not config.getoption("core") or not collection_path.is_relative_to(ROOT):
        return None
    place = collection_path.relative_to(ROOT)
    return True if place.parts and place.parts[0] not in FOLDERS else None


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """A module of a core run."""
    if not parent.config.getoption("core"):
        return None
    found: pytest.Module = CoreModule.from_parent(parent, path=module_path)
    return found


class CoreModule(pytest.Module):
    """A module that has no tests if it needs a package that is not installed."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Its tests."""
        try:
            return list(super().collect())
        except Exception as error:
            is_pure = self.path.relative_to(ROOT).parts[0] in PURE
            if is_pure or not _lacks_package(error):
                raise
            return []


def _lacks_package(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            return error.name.partition(".")[0] not in OWN
        error = error.__cause__ or error.__context__
    return False
