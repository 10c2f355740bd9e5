"""Routes by which users of an identity provider log in on the page, and what commands need for it.

The page's login is the authorization code flow with PKCE (RFC 7636). What belongs to one login is
in a cookie of the browser that began it, so no other browser can end it (login CSRF), and the
router keeps nothing. The tokens come to rest in cookies that scripts cannot read, and that count
only beside a header of the page's own requests. All redirects go to the provider or to the page.
"""

import base64
import hashlib
import hmac
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from plexrl.errors import (
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from plexrl.router.http.view_route import ViewRoute
from plexrl.router.services.authentication import PAGE_HEADER, SESSION_COOKIE
from plexrl.router.services.services import RouterServices, Services

if TYPE_CHECKING:
    from plexrl.router.services.oidc import Provider

LOG = logging.getLogger(__name__)
ROUTES = APIRouter(prefix="/v1/login", tags=["login"], route_class=ViewRoute)
LOGIN_COOKIE, REFRESH_COOKIE = "plexrl-login", "plexrl-refresh"
LOGIN_PARTS = ("state", "nonce", "verifier")
LOGIN_S = 600
REFRESH_S = 30 * 86_400
COOKIE_BYTES_MAX = 4000
"""Browsers drop larger ones silently."""


class LoginSettings(TypedDict):
    """What a command needs to log its user in."""

    issuer: str
    client_id: str
    """Of the device flow; empty: commands cannot log in."""
    scope: str


class LoggedOut(TypedDict):
    """The end of a login on this cluster."""

    url: str
    """Where to log out of the provider too; empty: it has no such page."""


@ROUTES.get("/settings", summary="The identity provider of the cluster; needs no key")
async def settings(services: Services) -> LoginSettings:
    """All empty: users cannot log in here."""
    if services.keys.provider is None:
        return {"issuer": "", "client_id": "", "scope": ""}
    config = services.keys.provider.config
    return {
        "issuer": config.issuer,
        "client_id": config.cli_client_id,
        "scope": config.scope,
    }


@ROUTES.get("", summary="Begin to log in on the page; needs no key")
async def begin(services: Services) -> Response:
    """To the identity provider."""
    provider = _provider(services)
    login = {name: secrets.token_urlsafe(32) for name in LOGIN_PARTS}
    digest = hashlib.sha256(login["verifier"].encode()).digest()
    query = {
        "response_type": "code",
        "client_id": provider.config.client_id,
        "redirect_uri": _callback(services),
        "scope": provider.config.scope,
        "state": login["state"],
        "nonce": login["nonce"],
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
        # Without it some providers give no refresh token.
        "prompt": "consent",
    }
    endpoint = await provider.endpoint("authorization_endpoint")
    reply = RedirectResponse(f"{endpoint}?{urlencode(query)}", 303, {"Cache-Control": "no-store"})
    # Lax: the provider's redirect back is a request from another site.
    _set_cookie(services, reply, LOGIN_COOKIE, ".".join(login.values()), LOGIN_S, same_site="lax")
    return reply


@ROUTES.get("/callback", summary="End of a login; the identity provider sends the browser here")
async def callback(
    request: Request, services: Services, state: str = "", code: str = "", iss: str = ""
) -> Response:
    """To the page. 401 if the login was not begun in this browser, or fails."""
    provider = _provider(services)
    login = _login_of(services, request)
    if not hmac.compare_digest(login["state"].encode(), state.encode()):
        raise AuthenticationError("this login was not begun in this browser: begin again")
    if iss not in ("", provider.config.issuer):
        raise AuthenticationError("another identity provider has answered: begin again")
    if not code:
        raise AuthenticationError("the identity provider refused the login: begin again")
    form = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": _callback(services),
        "code_verifier": login["verifier"],
    }
    with services.keys.limited(_address(request)):
        tokens = await _tokens(services, form)
        found = await provider.caller(tokens["id_token"], nonce=login["nonce"])
    request.state.caller, left_s = found
    reply = RedirectResponse(f"{provider.config.public_url.rstrip('/')}/dashboard", 303)
    _drop_cookie(services, reply, LOGIN_COOKIE)
    _keep(services, reply, tokens, left_s)
    return reply


@ROUTES.post("/refresh", summary="Go on with a login whose ID token has expired", status_code=204)
async def refresh(request: Request, services: Services) -> Response:
    """401 if the login has ended."""
    provider = _provider(services)
    _check_page(request)
    token = request.cookies.get(_name(services, REFRESH_COOKIE))
    if not token:
        raise AuthenticationError("the login has ended: log in again")
    form = {"grant_type": "refresh_token", "refresh_token": token}
    with services.keys.limited(_address(request)):
        try:
            tokens = await _tokens(services, form)
        except PermissionDeniedError as error:
            raise AuthenticationError("the login has ended: log in again") from error
        found = await provider.caller(tokens["id_token"])
    request.state.caller, left_s = found
    reply = Response(status_code=204)
    _keep(services, reply, tokens, left_s)
    return reply


@ROUTES.post("/logout", summary="End a login on the page")
async def logout(request: Request, services: Services, response: Response) -> LoggedOut:
    """The cookies are dropped, and the refresh token is revoked if the provider can do that and
    answers. The ID token counts until it expires, but nobody has it any more."""
    provider = _provider(services)
    _check_page(request)
    for name in (SESSION_COOKIE, REFRESH_COOKIE, LOGIN_COOKIE):
        _drop_cookie(services, response, name)
    token = request.cookies.get(_name(services, REFRESH_COOKIE))
    try:
        metadata = await provider.metadata()
        if token:
            form = {"token": token, "token_type_hint": "refresh_token", **_client(services)}
            await provider.revoke(form)
        return {"url": str(metadata.get("end_session_endpoint", ""))}
    except (UnavailableError, PermissionDeniedError, OSError) as error:
        LOG.warning("the refresh token of a login that has ended was not revoked: %s", error)
        return {"url": ""}


def _provider(services: RouterServices) -> "Provider":
    if services.keys.provider is None:
        raise NotFoundError("nobody can log in here: use an API key")
    return services.keys.provider


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _check_page(request: Request) -> None:
    if PAGE_HEADER not in request.headers:
        raise PermissionDeniedError("only the page at /dashboard sends this request")


def _callback(services: RouterServices) -> str:
    return f"{_provider(services).config.public_url.rstrip('/')}/v1/login/callback"


def _login_of(services: RouterServices, request: Request) -> dict[str, str]:
    """What the browser knows of the login that it has begun. Raises `AuthenticationError`."""
    try:
        parts = request.cookies.get(_name(services, LOGIN_COOKIE), "").split(".")
        return dict(zip(LOGIN_PARTS, parts, strict=True))
    except ValueError as error:
        raise AuthenticationError(
            "this login was not begun in this browser: begin again"
        ) from error


def _client(services: RouterServices) -> dict[str, str]:
    config = _provider(services).config
    client = {"client_id": config.client_id}
    if config.client_secret_file:
        client["client_secret"] = Path(config.client_secret_file).read_text().strip()
    return client


async def _tokens(services: RouterServices, form: dict[str, str]) -> dict[str, str]:
    provider = _provider(services)
    endpoint = await provider.endpoint("token_endpoint")
    found = await provider.ask("POST", endpoint, {**form, **_client(services)})
    if not isinstance(found.get("id_token"), str):
        raise AuthenticationError("the identity provider gives no ID token: its scope lacks openid")
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _keep(services: RouterServices, reply: Response, tokens: dict[str, str], left_s: float) -> None:
    _set_cookie(services, reply, SESSION_COOKIE, tokens["id_token"], int(left_s))
    if "refresh_token" in tokens:
        _set_cookie(services, reply, REFRESH_COOKIE, tokens["refresh_token"], REFRESH_S)


def _set_cookie(
    services: RouterServices,
    reply: Response,
    name: str,
    value: str,
    age_s: int,
    same_site: Literal["lax", "strict"] = "strict",
) -> None:
    if len(value) > COOKIE_BYTES_MAX:
        raise AuthenticationError("the user's token is too large for a cookie: list fewer groups")
    reply.set_cookie(
        _name(services, name),
        value,
        max_age=age_s,
        httponly=True,
        samesite=same_site,
        secure=_provider(services).is_secure,
    )


def _drop_cookie(services: RouterServices, reply: Response, name: str) -> None:
    reply.delete_cookie(_name(services, name), httponly=True, secure=_provider(services).is_secure)


def _name(services: RouterServices, name: str) -> str:
    return _provider(services).cookie(name)
