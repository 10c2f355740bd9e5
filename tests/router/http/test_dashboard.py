"""Pages of the router: /dashboard runs its own modules only and needs no key itself; the API's
documentation is served on request."""

import re

import httpx

from plexrl.router.http.dashboard.page import FILES, HEADERS
from tests.router.live_router import live_router


def test_the_page_is_served_under_a_policy_that_admits_its_own_modules_only() -> None:
    with live_router() as router, httpx.Client(base_url=router.url) as client:
        for path, (content, media_type) in FILES.items():
            address = "/dashboard" if path == "index.html" else f"/dashboard/{path}"
            found = client.get(address)
            assert (found.status_code, found.content) == (200, content)
            assert found.headers["content-type"] == media_type
            policy = found.headers["content-security-policy"]
            assert policy == HEADERS["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
        moved = client.get("/dashboard/")
        assert (moved.status_code, moved.headers["location"]) == (307, "../dashboard")
        assert client.get("/dashboard/", follow_redirects=True).url.path == "/dashboard"
        for path in ("nothing.js", "../page.py", "%2e%2e/page.py", "views"):
            assert client.get(f"/dashboard/{path}").status_code in (401, 404), path
        assert client.get("/v1/overview").status_code == 401
    # Nothing from elsewhere, and no markup from data.
    for path, (content, _) in FILES.items():
        text = content.decode()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(r"innerHTML|insertAdjacent|document\.write|\son\w+=|eval\(", text), (
            path
        )


def test_every_module_and_style_that_the_page_names_exists() -> None:
    named = set(re.findall(r'(?:src|href)="dashboard/([^"]+)"', FILES["index.html"][0].decode()))
    for path, (content, _) in FILES.items():
        folder = path.rpartition("/")[0]
        for module in re.findall(r'from "([^"]+)"', content.decode()):
            parts = [part for part in f"{folder}/{module}".split("/") if part not in (".", "")]
            while ".." in parts:
                at = parts.index("..")
                del parts[at - 1 : at + 1]
            named.add("/".join(parts))
    assert named == set(FILES) - {"index.html"}


def test_api_docs_are_served_only_if_enabled() -> None:
    for api_docs, status in (False, 404), (True, 200):
        with live_router(api_docs=api_docs) as router:
            for path in ("/docs", "/openapi.json", "/redoc"):
                found = httpx.get(router.url + path, timeout=60)
                assert found.status_code == status, path
