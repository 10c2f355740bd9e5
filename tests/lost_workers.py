"""How a run of several processes shares out its tests, and what it does when a process dies: it
reports the test that ran there, runs the rest, and ends.

The scheduler of pytest-xdist does neither with `--dist loadfile`. It runs the test that killed the
process again, in process after process. And a process begins a test when it has the next one: if it
gets a single one that is left of a file, it waits, and the run stays at 99 % for ever.
"""

import faulthandler
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from xdist.scheduler import LoadFileScheduling, Scheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController


HANGING_S = 60.0
"""Time after a test's own timeout in which Python may still end it."""
LONG_FOLDERS = tuple(
    f"tests/{name}/" for name in ("hosts", "cluster", "benchmarks", "statemanager", "worker")
)
"""Their tests wait for processes half of the time."""
LONG_PART = 0.9
"""The part of a run in which the files of `LONG_FOLDERS` begin."""


class LoadFileOnce(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist ships no types
    """As `LoadFileScheduling`. A test whose process died has had its turn."""

    def schedule(self) -> None:
        """Hand out the first files. Those of the most tests are not the longest ones."""
        self.config.option.loadscopereorder = False
        super().schedule()

    def remove_node(self, node: "WorkerController") -> str | None:
        """Take a process out; returns the test that it died of, if it had any left."""
        units = self.assigned_work.pop(node)
        left = [(unit, test) for unit in units.values() for test, done in unit.items() if not done]
        if not left:
            return None
        unit: dict[str, bool]
        died_of: str
        unit, died_of = left[0]
        unit[died_of] = True
        self.workqueue.update(
            {name: unit for name, unit in units.items() if not all(unit.values())}
        )
        for other in self.assigned_work:
            self._reschedule(other)
        return died_of

    def _reschedule(self, node: "WorkerController") -> None:
        if node not in self.registered_collections:
            # It has just been started, and gets its share when it knows the tests.
            return
        queued = -1
        while queued != len(self.workqueue):
            # A process begins a test when it has the next one, or knows that there is none.
            queued = len(self.workqueue)
            super()._reschedule(node)
        if not self.workqueue:
            node.shutdown()


def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> Scheduling | None:
    """A hook of pytest-xdist. None: its own scheduler."""
    return LoadFileOnce(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files in the order of `mix`."""
    files = [item.nodeid.partition("::")[0] for item in items]
    places = {file: place for place, file in enumerate(mix(files))}
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


def mix(files: Iterable[str]) -> list[str]:
    """The files, each once: those of `LONG_FOLDERS`, in the folders' order, and evenly between them
    the others, so that tests that wait run beside tests that compute. The last ones are short: at
    the end of a run no process is left alone with a long one."""
    found = list(dict.fromkeys(files))
    long = [file for folder in LONG_FOLDERS for file in found if file.startswith(folder)]
    others = [file for file in found if not file.startswith(LONG_FOLDERS)]
    places = {file: LONG_PART * index / len(long) for index, file in enumerate(long)}
    places |= {file: index / len(others) for index, file in enumerate(others)}
    return sorted(places, key=lambda file: places[file])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test with a longer `timeout` of its own may take that long before its process is ended."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(item.config.getini("faulthandler_timeout"))
    if marker is None or not marker.args or not limit_s or marker.args[0] <= limit_s:
        return
    # In place of the timer that pytest has set for all tests alike.
    faulthandler.dump_traceback_later(
        marker.args[0] + HANGING_S,
        file=item.config.stash[fault_handler_stderr_fd_key],
        exit=bool(item.config.getini("faulthandler_exit_on_timeout")),
    )
