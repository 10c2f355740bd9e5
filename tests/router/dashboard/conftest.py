"""A router whose scheduler knows a fleet, and a browser's tab."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.router.dashboard.agents import connected, greetings
from tests.router.dashboard.browser import Browser, Tab, running_browser
from tests.router.dashboard.fleet import SETTINGS, SMALL, Fleet, build, write_journal
from tests.router.live_router import LiveRouter, live_router


@contextmanager
def router_of(fleet: Fleet, folder: Path) -> Iterator[LiveRouter]:
    """A router whose scheduler knows the fleet."""
    journal, now = folder / "fleet.sqlite", time.time()
    core = build(fleet, now).core
    write_journal(journal, core, now)
    with live_router(
        scheduler_config={**SETTINGS, "journal": str(journal)},
        beside=lambda scheduler: connected(scheduler, greetings(core)),
    ) as router:
        yield router


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    with router_of(SMALL, tmp_path_factory.mktemp("f")) as router:
        yield router


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with running_browser() as found:
        yield found


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    found = Tab(browser)
    yield found
    found.close()
