"""Pages of the router: /dashboard runs its own script only and needs no key itself; the API's
documentation is served on request."""

import re

import httpx

from plexrl.router.http.dashboard.page import HEADERS, PAGE
from tests.router.live_router import live_router


def test_the_page_is_served_under_a_policy_that_admits_its_own_script_only() -> None:
    with live_router() as router, httpx.Client(base_url=router.url) as client:
        page = client.get("/dashboard")
        assert page.status_code == 200
        assert page.text == PAGE
        policy = page.headers["content-security-policy"]
        assert policy == HEADERS["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert client.get("/v1/rollouts").status_code == 401
    # Nothing from elsewhere, and no markup from data.
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", PAGE)
    assert not re.search(r"innerHTML|insertAdjacent|document\.write|\son\w+=", PAGE)


def test_api_docs_are_served_only_if_enabled() -> None:
    for api_docs, status in (False, 404), (True, 200):
        with live_router(api_docs=api_docs) as router:
            for path in ("/docs", "/openapi.json", "/redoc"):
                found = httpx.get(router.url + path, timeout=60)
                assert found.status_code == status, path
