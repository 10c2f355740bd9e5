"""Logins of commands at a cluster's identity provider, by the device flow (RFC 8628).

A login is a private file of the user. Its ID token is what requests carry; it is renewed by the
refresh token when it is about to expire.
"""

import base64
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from plexrl.access import is_confidential
from plexrl.errors import AuthenticationError, InvalidRequestError, UnavailableError
from plexrl.process.folders.operator_key import write_private

DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
EXPIRING_S = 30.0
"""A token that expires sooner is renewed first."""
TIMEOUT_S = 30.0


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
    revocation_endpoint: str = ""
    """Empty: the provider revokes no tokens, or an earlier version has made the login."""


def log_in(url: str, show: Callable[[str, str], None], *, ca: str | None = None) -> Login:
    """Log a user in on the cluster at `url`. `show` gets the address that the user shall open, and
    the code to compare there; this returns when the user has agreed.

    Raises:
        InvalidRequestError: users cannot log in there.
        AuthenticationError: the user has refused, or was too slow.
        UnavailableError: the cluster or the provider does not answer.
    """
    with httpx.Client(timeout=TIMEOUT_S, verify=ca or True) as cluster:
        found = _read_json(cluster, f"{url.rstrip('/')}/v1/login/settings")
    if not found.get("client_id"):
        raise InvalidRequestError(f"users cannot log in at {url}: use an API key")
    client_id = str(found["client_id"])
    with httpx.Client(timeout=TIMEOUT_S) as provider:
        metadata = _metadata(provider, str(found["issuer"]))
        form = {"client_id": client_id, "scope": str(found["scope"])}
        begun = _ask(provider, metadata["device_authorization_endpoint"], form)
        if "device_code" not in begun:
            raise AuthenticationError(f"the identity provider refused: {begun.get('error')}")
        show(
            begun.get("verification_uri_complete") or begun["verification_uri"], begun["user_code"]
        )
        tokens = _wait(provider, metadata["token_endpoint"], client_id, begun)
    return _renewed(
        Login(
            url=url,
            token_endpoint=metadata["token_endpoint"],
            client_id=client_id,
            id_token="",
            expires_at=0.0,
            revocation_endpoint=metadata.get("revocation_endpoint", ""),
        ),
        tokens,
    )


def store(login: Login) -> Path:
    """Keep a login. Returns its file."""
    file = _file(login.url)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(file, json.dumps(asdict(login)))
    return file


def forget(url: str) -> bool | None:
    """Drop a login, and revoke its refresh token if the provider can do that. Returns whether the
    login has ended at the provider too; None: there was no login."""
    login = _read(url)
    _file(url).unlink(missing_ok=True)
    if login is None:
        return None
    if not login.refresh_token:
        return True
    if not login.revocation_endpoint:
        return False
    form = {
        "token": login.refresh_token,
        "token_type_hint": "refresh_token",
        "client_id": login.client_id,
    }
    try:
        reply = httpx.post(login.revocation_endpoint, data=form, timeout=TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return reply.status_code == 200


def stored_token(url: str) -> str | None:
    """The ID token of the user's login at `url`; None: there is none.

    Raises:
        AuthenticationError: the login has ended.
        UnavailableError: the provider does not answer.
    """
    login = _read(url)
    if login is None:
        return None
    if not _is_expiring(login):
        return login.id_token
    with _alone(url):
        # Another command may have renewed it, or ended it, in the meantime.
        login = _read(url)
        if login is None:
            return None
        return login.id_token if not _is_expiring(login) else _renew(login).id_token


def _is_expiring(login: Login) -> bool:
    return time.time() >= login.expires_at - EXPIRING_S


@contextmanager
def _alone(url: str) -> Iterator[None]:
    """Renew a login alone: a provider that rotates refresh tokens takes two uses of one for theft,
    and ends the login."""
    with _file(url).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _renew(login: Login) -> Login:
    ended = AuthenticationError(f"the login at {login.url} has ended: plexrl login {login.url}")
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
    renewed = _renewed(login, tokens)
    store(renewed)
    return renewed


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


def _renewed(login: Login, tokens: Mapping[str, Any]) -> Login:
    """The login with new tokens. The provider may keep the refresh token as it is."""
    id_token = str(tokens["id_token"])
    return replace(
        login,
        id_token=id_token,
        expires_at=time.time() + _valid_s(id_token),
        refresh_token=str(tokens.get("refresh_token", login.refresh_token)),
    )


def _valid_s(id_token: str) -> float:
    """How long an ID token that was just made counts. `expires_in` beside it is the access token's,
    which may live for longer."""
    try:
        part = id_token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        return float(claims["exp"]) - float(claims["iat"])
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise UnavailableError("the identity provider gives an ID token without times") from error


def _metadata(provider: httpx.Client, issuer: str) -> dict[str, str]:
    _check_url(issuer)
    found = _read_json(provider, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    endpoints = ("device_authorization_endpoint", "token_endpoint")
    if found.get("issuer") != issuer or not all(map(found.get, endpoints)):
        raise UnavailableError(f"the identity provider {issuer} has no device flow now")
    for name in (*endpoints, "revocation_endpoint"):
        if name in found:
            _check_url(str(found[name]))
    return found


def _check_url(url: str) -> None:
    """Refuse to send secrets over a network that others read. Raises `InvalidRequestError`."""
    if not is_confidential(url):
        raise InvalidRequestError(f"{url} is no https URL: no secret is sent there")


def _read_json(client: httpx.Client, url: str) -> dict[str, Any]:
    """A document; empty: there is none at the URL. Raises `UnavailableError`."""
    try:
        reply = client.get(url)
        found = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UnavailableError(f"{url} does not answer as expected: {error!r}") from error
    return found if isinstance(found, dict) else {}


def _ask(provider: httpx.Client, endpoint: str, form: Mapping[str, str]) -> dict[str, Any]:
    """The provider's answer, or its OAuth error as `error`."""
    try:
        found = provider.post(endpoint, data=form).json()
    except (httpx.HTTPError, ValueError) as error:
        raise UnavailableError(f"the identity provider does not answer: {error!r}") from error
    return found if isinstance(found, dict) else {}


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
