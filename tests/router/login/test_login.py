"""Users of a real identity provider log in, and get what the groups claim entitles them to."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from tests.free_ports import free_port
from tests.router.live_router import LiveRouter, live_router
from tests.router.login.provider import (
    agree,
    installed_provider,
    new_key,
    running_provider,
    settings_file,
)

OF_PAGE = {"PlexRL-Page": "1"}


@dataclass
class Place:
    """A router, and the provider of its users."""

    router: LiveRouter
    issuer: str
    folder: Path
    provider_port: int

    def browser(self) -> httpx.Client:
        return httpx.Client(timeout=60, follow_redirects=False)

    def log_in(self, browser: httpx.Client, account: str) -> httpx.Response:
        """Through all pages to the router's answer to the provider's redirect."""
        return agree(browser, f"{self.router.url}/v1/login", account, "/v1/login/callback")

    def whoami(self, browser: httpx.Client) -> httpx.Response:
        return browser.get(f"{self.router.url}/v1/whoami", headers=OF_PAGE)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed_provider(tmp_path_factory.mktemp("provider"))


@contextmanager
def place(folder: Path, token_s: int = 300) -> Iterator[Place]:
    with ExitStack() as stack:
        provider_port, router_port = free_port(), free_port()
        url = f"http://127.0.0.1:{router_port}"
        issuer = stack.enter_context(
            running_provider(
                folder, provider_port, f"{url}/v1/login/callback", [new_key("first")], token_s
            )
        )
        file = settings_file(folder, issuer, url)
        router = stack.enter_context(live_router(port=router_port, oidc_file=str(file)))
        with router.client() as operator:
            operator.post("/v1/tenants", json={"name": "a"}).raise_for_status()
        yield Place(router, issuer, folder, provider_port)


@pytest.fixture(scope="module")
def here(packages: Path) -> Iterator[Place]:
    with place(packages) as found:
        yield found


@pytest.mark.parametrize(
    ("account", "tenant", "role"),
    [("ada", "a", "member"), ("grace", "a", "admin"), ("ops", "operator", "viewer")],
)
def test_a_group_gives_a_user_of_the_page_a_tenant_and_a_role(
    here: Place, account: str, tenant: str, role: str
) -> None:
    with here.browser() as browser:
        done = here.log_in(browser, account)
        assert done.status_code == 303
        assert done.headers["location"] == f"{here.router.url}/dashboard"
        cookies = done.headers.get_list("set-cookie")
        kept = [each for each in cookies if "Max-Age=0" not in each]
        assert len(kept) == 2
        assert all("HttpOnly" in each and "SameSite=strict" in each for each in kept)
        found = here.whoami(browser).json()
        user = f"{account}@example.org"
        assert (found["tenant"], found["role"], found["user"]) == (tenant, role, user)
        body = {"job": f"of-{account}", "name": "n"}
        made = browser.post(f"{here.router.url}/v1/jobs", json=body, headers=OF_PAGE)
        assert made.status_code == (403 if role == "viewer" else 201)
        if role != "viewer":
            assert made.json()["user"] == user


def test_a_user_without_a_granted_group_gets_nothing(here: Place) -> None:
    with here.browser() as browser:
        assert here.log_in(browser, "mallory").status_code == 403
        assert here.whoami(browser).status_code == 401


def test_cookies_alone_make_no_request_in_the_users_name(here: Place) -> None:
    with here.browser() as browser:
        here.log_in(browser, "ada")
        assert browser.get(f"{here.router.url}/v1/whoami").status_code == 401
        for path in ("refresh", "logout"):
            assert browser.post(f"{here.router.url}/v1/login/{path}").status_code == 403
        assert here.whoami(browser).status_code == 200


def test_a_login_ends_only_in_the_browser_that_began_it(here: Place) -> None:
    with here.browser() as mine, here.browser() as other:
        begun = mine.get(f"{here.router.url}/v1/login")
        sent = parse_qs(urlsplit(begun.headers["location"]).query)
        assert sent["code_challenge_method"] == ["S256"]
        callback = f"{here.router.url}/v1/login/callback"
        query = {"state": sent["state"][0], "code": "x"}
        assert other.get(callback, params=query).status_code == 401
        other.get(f"{here.router.url}/v1/login")
        assert other.get(callback, params=query).status_code == 401
        elsewhere = {**query, "iss": "https://evil.example"}
        assert mine.get(callback, params=elsewhere).status_code == 401
        assert mine.get(callback, params={"state": query["state"]}).status_code == 401
        assert mine.get(callback, params=query).status_code == 403, "an invented code"
        assert here.whoami(mine).status_code == 401


def test_logging_out_ends_the_login_and_its_refresh_token(here: Place) -> None:
    with here.browser() as browser:
        here.log_in(browser, "ada")
        refresh = browser.cookies["plexrl-refresh"]
        ended = browser.post(f"{here.router.url}/v1/login/logout", headers=OF_PAGE)
        assert ended.json()["url"].startswith(here.issuer)
        assert here.whoami(browser).status_code == 401
        browser.cookies.set("plexrl-refresh", refresh, domain="127.0.0.1")
        again = browser.post(f"{here.router.url}/v1/login/refresh", headers=OF_PAGE)
        assert again.status_code == 401


def test_an_expired_login_goes_on_with_its_refresh_token(packages: Path) -> None:
    with place(packages, token_s=3) as here, here.browser() as browser:
        here.log_in(browser, "ada")
        token = browser.cookies["plexrl-session"]
        stale = httpx.Client(headers={"Authorization": f"Bearer {token}"}, timeout=60)
        while stale.get(f"{here.router.url}/v1/whoami").status_code == 200:
            time.sleep(0.2)
        for _ in range(2):
            renewed = browser.post(f"{here.router.url}/v1/login/refresh", headers=OF_PAGE)
            assert renewed.status_code == 204
            assert here.whoami(browser).status_code == 200
        stale.close()


def test_a_new_key_of_the_provider_is_found_and_an_old_one_forgotten(packages: Path) -> None:
    with ExitStack() as stack:
        port, router_port = free_port(), free_port()
        url = f"http://127.0.0.1:{router_port}"
        callback = f"{url}/v1/login/callback"
        file = settings_file(packages, f"http://127.0.0.1:{port}", url)
        router = stack.enter_context(live_router(port=router_port, oidc_file=str(file)))
        with router.client() as operator:
            operator.post("/v1/tenants", json={"name": "a"}).raise_for_status()
        tokens = []
        for kid in ("first", "second"):
            with running_provider(packages, port, callback, [new_key(kid)]) as issuer:
                found = Place(router, issuer, packages, port)
                with found.browser() as browser:
                    # The keys are read again some seconds after the last time.
                    while found.log_in(browser, "ada").status_code == 401:
                        time.sleep(0.5)
                    assert found.whoami(browser).status_code == 200
                    tokens.append(browser.cookies["plexrl-session"])
        assert len(set(tokens)) == 2


def plexrl(here: Place, home: Path, *words: str) -> "subprocess.Popen[str]":
    variables = {**os.environ, "XDG_CONFIG_HOME": str(home), "PLEXRL_URL": here.router.url}
    variables.pop("PLEXRL_API_KEY", None)
    command = [sys.executable, "-m", "plexrl.cli.app", *words]
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def output(process: "subprocess.Popen[str]") -> tuple[int, str]:
    text, _ = process.communicate(timeout=120)
    return process.returncode, text


def test_a_command_acts_for_the_user_who_logged_in_by_the_device_flow(
    here: Place, tmp_path: Path
) -> None:
    process = plexrl(here, tmp_path, "login", here.router.url)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"Open (\S+) .*: (\S+)", line)
    assert found is not None, line
    with here.browser() as browser:
        agree(browser, found.group(1), "ada", "Sign-in Success")
    code, text = output(process)
    assert code == 0, text
    (file,) = (tmp_path / "plexrl").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    code, text = output(plexrl(here, tmp_path, "keys", "whoami"))
    assert code == 0, text
    assert "ada@example.org" in text
    assert "member" in text
    assert output(plexrl(here, tmp_path, "logout", here.router.url))[0] == 0
    assert output(plexrl(here, tmp_path, "keys", "whoami"))[0] != 0


def test_logins_are_in_the_audit_log_and_no_token_is_in_any_log(here: Place) -> None:
    with here.browser() as browser:
        here.log_in(browser, "grace")
        secrets = [str(each.value) for each in browser.cookies.jar if len(str(each.value)) > 30]
        assert secrets
    with here.router.client() as operator:
        lines: list[dict[str, Any]] = operator.get(
            "/v1/audit", params={"target": "/v1/login", "user": "grace@example.org"}
        ).json()["lines"]
    assert {(line["role"], line["outcome"]) for line in lines} == {("admin", "done")}
    audit = here.router.log.parent / "data" / "audit"
    text = "".join(file.read_text() for file in (here.router.log, *audit.iterdir()))
    assert [secret for secret in secrets if secret in text] == []
    assert "code=" not in text
