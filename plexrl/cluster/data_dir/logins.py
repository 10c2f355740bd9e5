"""Logins of commands at a cluster's identity provider, by the device flow (RFC 8628).

A login is a private file of the user. Its ID token is what requests carry; it is renewed by the
refresh token when it is about to expire.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from plexrl.errors import AuthenticationError, InvalidRequestError, UnavailableError

DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
EXPIRING_S = 30.0
"""A token that expires sooner is renewed first."""
TIMEOUT_S = 30.0
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user's login on one cluster."""

    url: str
    token_endpoint: str
    client_id: str
    id_token: str
    expires_at: float
    """When the ID token expires, in seconds since the epoch, by this machine's clock."""
    refresh_token: str = ""
    """Empty: the login ends with its ID token."""


def log_in(url: str, show: Callable[[str, str], None], *, ca: str | None = None) -> Login:
    """Log a user in on the cluster at `url`. `show` gets the address that the user shall open, and
    the code to compare there; this returns when the user has agreed.

    Raises:
        InvalidRequestError: users cannot log in there.
        AuthenticationError: the user has refused, or was too slow.
    """
    with httpx.Client(timeout=TIMEOUT_S, verify=ca or True) as cluster:
        reply = cluster.get(f"{url.rstrip('/')}/v1/login/settings")
        found = reply.json() if reply.status_code == 200 else {}
    if not found.get("client_id"):
        raise InvalidRequestError(f"users cannot log in at {url}: use an API key")
    client_id = str(found["client_id"])
    with httpx.Client(timeout=TIMEOUT_S) as provider:
        metadata = _metadata(provider, str(found["issuer"]))
        form = {"client_id": client_id, "scope": str(found["scope"])}
        begun = _ask(provider, metadata["device_authorization_endpoint"], form)
        show(
            begun.get("verification_uri_complete") or begun["verification_uri"], begun["user_code"]
        )
        tokens = _wait(provider, metadata["token_endpoint"], client_id, begun)
    return _login(url, metadata["token_endpoint"], client_id, tokens)


def store(login: Login) -> Path:
    """Keep a login. Returns its file."""
    file = _file(login.url)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(asdict(login), stream)
    part.rename(file)
    return file


def forget(url: str) -> bool:
    """Drop a login, also at the provider if it allows that. Returns whether there was one."""
    login = _read(url)
    _file(url).unlink(missing_ok=True)
    return login is not None


def stored_token(url: str) -> str | None:
    """The ID token of the user's login at `url`; None: there is none.

    Raises:
        AuthenticationError: the login has ended.
        UnavailableError: the provider does not answer.
    """
    login = _read(url)
    if login is None:
        return None
    if time.time() < login.expires_at - EXPIRING_S:
        return login.id_token
    ended = AuthenticationError(f"the login at {url} has ended: plexrl login {url}")
    if not login.refresh_token:
        raise ended
    form = {
        "grant_type": "refresh_token",
        "client_id": login.client_id,
        "refresh_token": login.refresh_token,
    }
    with httpx.Client(timeout=TIMEOUT_S) as provider:
        tokens = _ask(provider, login.token_endpoint, form)
    if "id_token" not in tokens:
        raise ended
    renewed = _login(url, login.token_endpoint, login.client_id, tokens)
    # A provider that rotates refresh tokens has made the former one invalid.
    store(replace(renewed, refresh_token=renewed.refresh_token or login.refresh_token))
    return renewed.id_token


def _wait(
    provider: httpx.Client, endpoint: str, client_id: str, begun: Mapping[str, Any]
) -> dict[str, Any]:
    """The tokens, once the user has agreed."""
    interval_s = float(begun.get("interval", 5))
    until = time.monotonic() + float(begun["expires_in"])
    form = {
        "grant_type": DEVICE_GRANT,
        "client_id": client_id,
        "device_code": str(begun["device_code"]),
    }
    while time.monotonic() < until:
        time.sleep(interval_s)
        found = _ask(provider, endpoint, form)
        if "id_token" in found:
            return found
        if found.get("error") == "slow_down":
            interval_s += 5.0
        elif found.get("error") != "authorization_pending":
            break
    raise AuthenticationError("the login was refused, or took too long: begin again")


def _login(url: str, endpoint: str, client_id: str, tokens: Mapping[str, Any]) -> Login:
    return Login(
        url=url,
        token_endpoint=endpoint,
        client_id=client_id,
        id_token=str(tokens["id_token"]),
        expires_at=time.time() + float(tokens.get("expires_in", 300)),
        refresh_token=str(tokens.get("refresh_token", "")),
    )


def _metadata(provider: httpx.Client, issuer: str) -> dict[str, str]:
    reply = provider.get(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    found: dict[str, str] = reply.json() if reply.status_code == 200 else {}
    endpoints = ("device_authorization_endpoint", "token_endpoint")
    if found.get("issuer") != issuer or not all(map(found.get, endpoints)):
        raise UnavailableError(f"the identity provider {issuer} has no device flow now")
    for name in endpoints:
        parts = urlsplit(found[name])
        if parts.scheme != "https" and parts.hostname not in LOCAL_HOSTS:
            raise InvalidRequestError(f"{found[name]} is no https URL: no secret is sent there")
    return found


def _ask(provider: httpx.Client, endpoint: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The provider's answer, or its OAuth error as `error`."""
    try:
        found: dict[str, Any] = provider.post(endpoint, data=form).json()
    except (httpx.HTTPError, ValueError) as error:
        raise UnavailableError(f"the identity provider does not answer: {error!r}") from error
    return found


def _read(url: str) -> Login | None:
    try:
        return Login(**json.loads(_file(url).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"{_file(url)} cannot be read: {error}: remove it") from error


def _file(url: str) -> Path:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    name = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    return folder / "plexrl" / f"login-{name}.json"
