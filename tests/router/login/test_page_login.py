"""In a browser: from the page to the identity provider's pages and back, and out again."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.router.dashboard.browser import Tab, needs_browser, running_browser
from tests.router.login.provider import installed_provider
from tests.router.login.test_login import place

pytestmark = needs_browser
WAIT_S = 60.0
IS_IN = "document.querySelector('#forget')?.textContent === 'Log out'"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_provider(tmp_path_factory.mktemp("provider"))


@pytest.fixture
def tab() -> Iterator[Tab]:
    with running_browser() as browser:
        found = Tab(browser)
        yield found
        found.close()


def wait_over_pages(tab: Tab, condition: str) -> None:
    """Wait until an expression is true, on this page or one that it leads to."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        # A page that goes away meanwhile answers with an error.
        with suppress(AssertionError):
            if tab.evaluate(condition):
                return
        time.sleep(0.1)
    pytest.fail(f"never true: {condition}: {tab.evaluate('document.body.innerText')}")


def test_a_user_logs_in_on_the_page_and_out_again(packages: Path, tab: Tab) -> None:
    with place(packages) as here:
        tab.open(f"{here.router.url}/dashboard")
        wait_over_pages(tab, "document.querySelector('#login')?.hidden === false")
        tab.evaluate("document.querySelector('#login').click()")
        wait_over_pages(tab, "document.querySelector('input[name=login]') !== null")
        tab.evaluate(
            "document.querySelector('input[name=login]').value = 'ada';"
            "document.querySelector('input[name=password]').value = 'x';"
            "document.querySelector('form').submit()"
        )
        wait_over_pages(tab, f"{IS_IN} || document.body?.innerText.includes('Authorize')")
        if not tab.evaluate(IS_IN):
            tab.evaluate("document.querySelector('form').submit()")
        wait_over_pages(tab, IS_IN)
        wait_over_pages(tab, "document.querySelector('#main').children.length > 0")
        assert tab.evaluate("location.pathname + location.search") == "/dashboard"
        assert tab.evaluate("document.cookie") == "", "no script can read the tokens"
        assert tab.evaluate("JSON.stringify({...sessionStorage})") == '{"plexrl-key":"login"}'
        tab.evaluate("sessionStorage.clear()")
        tab.open(f"{here.router.url}/dashboard")
        wait_over_pages(tab, IS_IN)
        tab.evaluate("document.querySelector('#forget').click()")
        wait_over_pages(tab, f"location.origin === '{here.issuer}'")
        tab.open(f"{here.router.url}/dashboard")
        wait_over_pages(tab, "document.querySelector('#login')?.hidden === false")
        assert not tab.evaluate(IS_IN)
