"""A certified OpenID provider (npm's `oidc-provider`) as a process of its own, and a browser's part
of its logins, without a browser."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from joserfc.jwk import RSAKey

SOURCE = Path(__file__).parent / "provider.mjs"
PACKAGE = "oidc-provider@9"
INSTALL_S = 300
GROUPS = {"ada": ["researchers"], "grace": ["leads"], "ops": ["on-call"], "mallory": ["others"]}
GRANTS = (
    ("on-call", "operator", "viewer"),
    ("leads", "a", "admin"),
    ("researchers", "a", "member"),
)
FORM = re.compile(r"<form[^>]*action=\"([^\"]+)\".*?</form>", re.S)
FIELD = re.compile(r"<input[^>]*type=\"hidden\"[^>]*>", re.S)
STEPS_MAX = 20


def installed_provider(folder: Path) -> Path:
    """A folder with the provider's program and packages; skips the test if npm cannot get these."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm on this machine")
    words = [npm, "install", "--prefix", str(folder), PACKAGE, "--no-audit", "--no-fund"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr[-200:]}")
    shutil.copy(SOURCE, folder / SOURCE.name)
    return folder


def new_key(kid: str) -> dict[str, Any]:
    """A private key of the provider, as it is configured."""
    key = RSAKey.generate_key(2048, {"kid": kid, "use": "sig", "alg": "RS256"})
    return dict(key.as_dict(private=True))


@contextmanager
def running_provider(
    folder: Path, port: int, redirect: str, keys: list[dict[str, Any]], token_s: int = 300
) -> Iterator[str]:
    """The provider; gives its issuer."""
    settings = {
        "port": port,
        "redirect": redirect,
        "jwks": {"keys": keys},
        "groups": GROUPS,
        "token_s": token_s,
    }
    with (folder / "provider.log").open("a") as log:
        words = ["node", SOURCE.name, json.dumps(settings)]
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n", (folder / "provider.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def settings_file(folder: Path, issuer: str, public_url: str) -> Path:
    """The router's settings for the provider."""
    (folder / "client.secret").write_text("secret-of-page\n")
    lines = [
        f'issuer = "{issuer}"',
        f'public_url = "{public_url}"',
        'client_id = "page"',
        'cli_client_id = "cli"',
        f'client_secret_file = "{folder / "client.secret"}"',
        'user_claim = "email"',
        "skew_s = 1.0",
        'scope = "openid offline_access groups email"',
    ]
    for group, tenant, role in GRANTS:
        lines += ["[[grants]]", f'group = "{group}"', f'tenant = "{tenant}"', f'role = "{role}"']
    file = folder / "oidc.toml"
    file.write_text("\n".join(lines))
    return file


def agree(browser: httpx.Client, url: str, account: str, until: str) -> httpx.Response:
    """Go through the provider's pages as `account`, and return the response at the path, or with
    the text, `until`."""
    reply = browser.get(url)
    for _ in range(STEPS_MAX):
        is_path = until.startswith("/")
        if until == urlsplit(str(reply.url)).path if is_path else until in reply.text:
            return reply
        if reply.is_redirect:
            reply = browser.get(urljoin(str(reply.url), reply.headers["location"]))
            continue
        form = FORM.search(reply.text)
        assert form is not None, reply.text
        fields = _hidden(form.group(0))
        if 'name="login"' in form.group(0):
            fields |= {"login": account, "password": "x"}
        target = urljoin(str(reply.url), unescape(form.group(1)))
        reply = browser.post(target, data=fields)
    pytest.fail(f"no end at {until}: {reply.url} {urlsplit(str(reply.url)).path}")


def _hidden(form: str) -> dict[str, str]:
    found = {}
    for field in FIELD.findall(form):
        name = re.search(r'name="([^"]*)"', field)
        value = re.search(r'value="([^"]*)"', field)
        if name is not None:
            found[name.group(1)] = unescape(value.group(1)) if value else ""
    return found
