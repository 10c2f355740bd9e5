"""The documentation as a site: every page, nothing from the internet, and readable on a phone."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from plexrl.client import public
from scripts.site import relinked
from tests.docs.pages import ROOT
from tests.router.dashboard.browser import Tab, needs_browser, running_browser

_FETCHED = re.compile(
    r"""<(?:script|img|link rel="(?:stylesheet|icon)")[^>]*(?:src|href)="(?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as strictly as `make site` builds it."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    build(config)
    return folder


@pytest.fixture
def tab() -> Iterator[Tab]:
    with running_browser() as browser:
        yield Tab(browser)


def test_every_page_is_on_the_site_and_in_its_navigation(site: Path) -> None:
    index = (site / "index.html").read_text()
    names = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert names <= {path.stem for path in site.glob("*.html")}
    assert names <= set(re.findall(r'href="(\w+)\.html"', index))


def test_a_page_fetches_nothing_from_other_hosts(site: Path) -> None:
    fetched = [path.name for path in site.glob("**/*.html") if _FETCHED.search(path.read_text())]
    assert fetched == []


def test_commands_and_public_names_are_read_from_the_code(site: Path) -> None:
    commands, api = ((site / name).read_text() for name in ("command_line.html", "api.html"))
    assert "plexrl nodes drain" in commands
    classes = [name for name in public.__all__ if name.istitle() and name.isalpha()]
    assert classes
    assert [name for name in classes if f">{name}<" not in api] == []


def test_links_out_of_the_folder_lead_to_the_sites_own_pages() -> None:
    text = (
        "[a](../benchmarks/RESULTS.md#b), [c](sdk.md), [d](../deploy/x.yaml), ![e](pictures/e.png)"
    )
    assert relinked(text, "docs/operating.md", "operating.md") == (
        "[a](results.md#b), [c](sdk.md), d (`deploy/x.yaml`), ![e](pictures/e.png)"
    )
    assert relinked("[s](docs/sdk.md)", "README.md", "readme.md") == "[s](sdk.md)"
    notebook = "[n](../examples/notebooks/planning.ipynb)"
    assert relinked(notebook, "docs/index.md", "index.md") == "[n](notebooks/planning.md)"


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(site: Path, tab: Tab, width: int) -> None:
    tab.show(width, 800)
    for path in sorted(site.glob("*.html")):
        tab.open(path.as_uri())
        tab.wait_for("document.readyState == 'complete'")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, path.name
