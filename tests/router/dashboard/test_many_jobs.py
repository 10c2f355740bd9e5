"""The page over 2 048 GPUs and 20 000 jobs: what it holds, and what a refresh sends.

`pytest -s` prints the figures.
"""

import sys
from collections.abc import Iterator

import pytest

from tests.router.dashboard.browser import Tab, needs_browser
from tests.router.dashboard.conftest import router_of
from tests.router.dashboard.fleet import BIG, GPUS_OF_A_NODE
from tests.router.dashboard.test_page import check_quiet, enter
from tests.router.live_router import LiveRouter

pytestmark = pytest.mark.slow
ANSWERS = {
    "/v1/overview": 4_000,
    "/v1/lanes": 400_000,
    "/v1/queue": 60_000,
    "/v1/queue?which=turns": 60_000,
    "/v1/queue?which=impossible": 60_000,
    "/v1/shares": 40_000,
}
"""Most bytes of each answer of which the first page consists, or one of its lists."""
HEAP_BYTES_MAX = 100 << 20
ELEMENTS_MAX = 3000
FULL = """document.querySelector('.bar i') && document.querySelectorAll('.lane').length === 13
  && document.querySelectorAll('tbody tr').length >= 16"""
"""Each part of the first page has its content."""
PAINTED_MS = "performance.now()"


def say(line: str) -> None:
    """Show a figure."""
    sys.stdout.write(f"{line}\n")


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRouter]:
    with router_of(BIG, tmp_path_factory.mktemp("f")) as router:
        yield router


def test_answers_stay_small(big: LiveRouter) -> None:
    with big.client() as client:
        overview = client.get("/v1/overview").json()
        assert overview["gpus"]["gpus"] == GPUS_OF_A_NODE * BIG.nodes
        assert overview["jobs_live"] == BIG.jobs
        for path, bytes_max in ANSWERS.items():
            answer = client.get(path)
            say(f"{path}: {len(answer.content)} bytes, {answer.elapsed.total_seconds():.3f} s")
            assert 0 < len(answer.content) < bytes_max, path
        lanes = client.get("/v1/lanes").json()
        assert len(lanes["lanes"]) == 64
        assert sum(band["groups"] for band in lanes["bands"]) == lanes["groups"] > 64


@needs_browser
def test_the_page_holds_little(big: LiveRouter, tab: Tab) -> None:
    enter(tab, big)
    tab.wait_for(FULL)
    tab.evaluate("location.reload()")
    tab.wait_for(FULL)
    painted_ms = tab.evaluate(PAINTED_MS)
    heap_bytes = tab.heap_bytes()
    say(f"first full paint {painted_ms:.0f} ms, heap {heap_bytes / 2**20:.1f} MiB")
    for place in ("lanes", "queue", "shares", ""):
        tab.evaluate(f"location.hash = '#/{place}'")
        tab.wait_for("document.querySelector('section td, section canvas[tabindex]')")
        elements = tab.evaluate("document.getElementsByTagName('*').length")
        say(f"#/{place}: {elements} elements, heap {tab.heap_bytes() / 2**20:.1f} MiB")
        assert elements < ELEMENTS_MAX, place
        assert tab.heap_bytes() < HEAP_BYTES_MAX
    check_quiet(tab)
