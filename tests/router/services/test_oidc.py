"""An ID token counts only if everything about it is right."""

import asyncio
import base64
import hmac
import json
import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Request, Response
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

from plexrl.access import AccessRole
from plexrl.errors import (
    AuthenticationError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    PlexRLError,
    UnavailableError,
)
from plexrl.router.http.dashboard.login import callback, logout, refresh
from plexrl.router.http.routes.tenants import USER
from plexrl.router.server.refused_keys import RefusedKeys
from plexrl.router.services.authentication import Caller, KeyCache
from plexrl.router.services.oidc import (
    KEYS_RETRY_S,
    TOKEN_BYTES_MAX,
    OidcConfig,
    OidcGrant,
    Provider,
    read_oidc,
)

ISSUER = "https://id.example"
KEY = RSAKey.generate_key(2048, {"kid": "a", "use": "sig"})
OTHER_KEY = RSAKey.generate_key(2048, {"kid": "a", "use": "sig"})
SKEW_S = 30.0
CONFIG = OidcConfig(
    issuer=ISSUER,
    client_id="page",
    cli_client_id="cli",
    public_url="https://plexrl.example",
    grants=(
        OidcGrant(group="leads", tenant="a", role=AccessRole.ADMIN),
        OidcGrant(group="all", tenant="b", role=AccessRole.MEMBER),
    ),
    user_claim="email",
    skew_s=SKEW_S,
)


def provider(keys: Any = None, **changes: Any) -> Provider:
    """A provider whose documents are these."""
    documents = {
        "/.well-known/openid-configuration": {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/jwks"},
        "/jwks": {"keys": [each.as_dict(private=False) for each in keys or [KEY]]},
        **changes,
    }

    def answer(request: httpx.Request) -> httpx.Response:
        found = documents.get(request.url.path)
        return httpx.Response(404 if found is None else 200, json=found)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return Provider(CONFIG, client=client)


def token(key: Any = KEY, algorithm: str = "RS256", kid: str = "a", **changes: Any) -> str:
    now = int(time.time())
    claims = {
        "iss": ISSUER,
        "aud": "page",
        "sub": "1",
        "iat": now,
        "exp": now + 300,
        "groups": ["all"],
        **changes,
    }
    claims = {name: value for name, value in claims.items() if value is not None}
    header = {"alg": algorithm, "kid": kid}
    return jwt.encode(header, claims, key, algorithms=[algorithm])


def caller(text: str, **options: Any) -> Caller:
    async def ask() -> Caller:
        found = options.pop("provider", None) or provider()
        return (await found.caller(text, **options))[0]

    return asyncio.run(ask())


def part(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def unsigned() -> str:
    head, body, _ = token().split(".")
    del head
    return f"{part({'alg': 'none'})}.{body}."


def signed_with_the_public_key() -> str:
    _, body, _ = token().split(".")
    signed = f"{part({'alg': 'HS256', 'kid': 'a'})}.{body}"
    digest = hmac.digest(KEY.as_pem(private=False), signed.encode(), "sha256")
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def test_groups_become_tenant_and_role_in_the_order_of_the_settings() -> None:
    assert caller(token()) == Caller("b", AccessRole.MEMBER, user="1", key="oidc")
    both = token(groups=["all", "leads"], email="x@y", email_verified=True, aud=["cli"])
    assert caller(both) == Caller("a", AccessRole.ADMIN, user="x@y", key="oidc")
    assert caller(token(groups="leads", email="x@y")).user == "1", "an address that nobody verified"
    for email, user in (("", "1"), ("Zoë 5%\n", "Zo%C3%AB%205%25%0A"), ("x" * 300, "x" * 200)):
        found = caller(token(email=email, email_verified=True)).user
        assert found == user
        assert re.fullmatch(USER, found)
    for groups in ([], ["none"], None):
        with pytest.raises(PermissionDeniedError, match="no group of yours"):
            caller(token(groups=groups))


@pytest.mark.parametrize(
    "text",
    [
        token(OTHER_KEY),
        unsigned(),
        signed_with_the_public_key(),
        token(iss="https://evil.example"),
        token(iss=None),
        token(aud="another"),
        token(aud=["page", "another"]),
        token(aud=None),
        token(azp="another"),
        token(sub=None),
        token(exp=None),
        token(exp=int(time.time() - SKEW_S) - 5),
        token(iat=int(time.time() + SKEW_S) + 600),
        token(nbf=int(time.time() + SKEW_S) + 600),
        "ey.x.y",
        token()[:-8] + "AAAAAAAA",
        "ey" + "x" * TOKEN_BYTES_MAX + "..",
        f"{part({'alg': 'RS256', 'kid': 'a', 'crit': 5})}..",
        f"{part({'alg': 'RS256', 'kid': 'a', 'crit': [['x']]})}..",
    ],
)
def test_a_wrong_token_does_not_count(text: str) -> None:
    with pytest.raises(AuthenticationError):
        caller(text)


def test_clocks_may_differ_by_the_skew() -> None:
    now = int(time.time())
    caller(token(exp=now - int(SKEW_S) + 10))
    caller(token(iat=now + int(SKEW_S) - 10))


def test_a_token_of_another_login_does_not_end_this_one() -> None:
    assert caller(token(nonce="n"), nonce="n").tenant == "b"
    for wrong in (token(nonce="m"), token()):
        with pytest.raises(AuthenticationError, match="another login"):
            caller(wrong, nonce="n")


def test_keys_of_other_kinds_count_by_their_id() -> None:
    curve = ECKey.generate_key("P-256", {"kid": "c", "use": "sig"})
    assert caller(token(curve, "ES256", "c"), provider=provider([KEY, curve])).tenant == "b"
    with pytest.raises(AuthenticationError):
        caller(token(curve, "ES256", "c"))


def test_a_provider_that_is_another_or_does_not_answer_lets_nobody_in() -> None:
    for changes in (
        {"/.well-known/openid-configuration": {"issuer": "https://evil.example"}},
        {"/.well-known/openid-configuration": None},
        {"/jwks": None},
    ):
        with pytest.raises(UnavailableError):
            caller(token(), provider=provider(**changes))
    for uri in ("http://id.example/jwks", "https://[", None):
        found = provider(
            **{"/.well-known/openid-configuration": {"issuer": ISSUER, "jwks_uri": uri}}
        )
        with pytest.raises(UnavailableError):
            caller(token(), provider=found)
    for keys in (None, 5, [], [5], [{"kty": "EC", "crv": "new"}]):
        with pytest.raises(UnavailableError, match="no keys"):
            caller(token(), provider=provider(**{"/jwks": {"keys": keys}}))


def test_no_secret_goes_to_an_endpoint_that_others_read() -> None:
    described = {
        "issuer": ISSUER,
        "token_endpoint": "http://id.example/token",
        "authorization_endpoint": "http://localhost@id.example/auth",
        "revocation_endpoint": "http://127.0.0.1:5/revoke",
    }
    found = provider(**{"/.well-known/openid-configuration": described})
    for name in ("token_endpoint", "authorization_endpoint", "device_authorization_endpoint"):
        with pytest.raises(UnavailableError, match=name):
            asyncio.run(found.endpoint(name))
    assert asyncio.run(found.endpoint("revocation_endpoint")).startswith("http://127")


def test_a_key_of_an_unknown_kind_beside_the_known_ones_locks_nobody_out() -> None:
    new = {"kty": "EC", "crv": "P-new", "x": "a", "y": "b", "kid": "n"}
    keys = [new, KEY.as_dict(private=False)]
    assert caller(token(), provider=provider(**{"/jwks": {"keys": keys}})).tenant == "b"


def test_while_the_provider_is_down_strangers_lock_no_known_user_out() -> None:
    asked = []
    is_down = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if is_down.is_set():
            await asyncio.sleep(0)
            raise httpx.ConnectTimeout("down")
        if request.url.path == "/jwks":
            return httpx.Response(200, json={"keys": [KEY.as_dict(private=False)]})
        return httpx.Response(200, json={"issuer": ISSUER, "jwks_uri": f"{ISSUER}/jwks"})

    async def run() -> None:
        found = Provider(CONFIG, client=httpx.AsyncClient(transport=httpx.MockTransport(answer)))
        await found.caller(token())
        is_down.set()
        found._read_at = found._tried_at = time.monotonic() - KEYS_RETRY_S
        strangers = [found.caller(token(OTHER_KEY)) for _ in range(20)]
        replies = await asyncio.gather(*strangers, return_exceptions=True)
        assert {type(reply) for reply in replies} == {AuthenticationError}
        assert len(asked) == 3, "one more look for all of them"
        assert (await found.caller(token()))[0].tenant == "b"

    asyncio.run(run())


def test_a_login_ends_on_the_page_although_the_provider_is_down() -> None:
    keys = KeyCache(RefusedKeys(burst=20, per_s=1.0))
    answers = {
        "/.well-known/openid-configuration": {
            "issuer": ISSUER,
            "revocation_endpoint": f"{ISSUER}/gone",
        }
    }
    headers = [(b"plexrl-page", b"1"), (b"cookie", b"__Host-plexrl-refresh=r")]
    request = Request({"type": "http", "headers": headers})
    for documents in (answers, {"/.well-known/openid-configuration": None}):
        keys.provider, response = provider(**documents), Response()
        services: Any = SimpleNamespace(keys=keys)
        assert asyncio.run(logout(request, services, response)) == {"url": ""}
        dropped = response.headers.getlist("set-cookie")
        assert len(dropped) == 3
        assert all("Max-Age=0" in each and each.startswith("__Host-") for each in dropped)


def test_strangers_make_the_router_ask_the_provider_no_more_than_their_limit() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            asked.append(request.url.path)
            return httpx.Response(400, json={"error": "invalid_grant"})
        described = {"issuer": ISSUER, "token_endpoint": f"{ISSUER}/token"}
        return httpx.Response(200, json=described)

    keys = KeyCache(RefusedKeys(burst=3, per_s=1e-9))
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    keys.provider = Provider(CONFIG, client=client)
    services: Any = SimpleNamespace(keys=keys)
    cookies = b"__Host-plexrl-refresh=r; __Host-plexrl-login=s.n.v"
    headers = [(b"plexrl-page", b"1"), (b"cookie", cookies)]
    request = Request({"type": "http", "headers": headers, "client": ("10.0.0.1", 1), "state": {}})

    async def run() -> list[type]:
        ends, begins = partial(refresh, request, services), partial(callback, request, services)
        return [
            await outcome(ends()),
            await outcome(begins("s", "code")),
            *[await outcome(ends()) for _ in range(3)],
            await outcome(begins("s", "code")),
        ]

    async def outcome(attempt: Any) -> type:
        with pytest.raises(PlexRLError) as caught:
            await attempt
        return caught.type

    first, second, third, *rest = asyncio.run(run())
    assert (first, second, third) == (
        *(AuthenticationError, PermissionDeniedError, AuthenticationError),
    )
    assert set(rest) == {OverloadedError}
    assert asked == ["/token"] * 3


def test_over_https_a_cookie_that_another_host_of_the_domain_has_set_does_not_count() -> None:
    keys = KeyCache(RefusedKeys(burst=20, per_s=1.0))

    def sent(name: str) -> str:
        headers = [(b"plexrl-page", b"1"), (b"cookie", f"{name}=ey.a.b".encode())]
        return keys.authorization_of(Request({"type": "http", "headers": headers}))

    assert sent("plexrl-session") == "", "nobody can log in"
    keys.provider = provider()
    assert sent("plexrl-session") == ""
    assert sent("__Host-plexrl-session") == "Bearer ey.a.b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('issuer = "http://id.example"', "no https URL"),
        ('public_url = "ftp://plexrl.example"', "no https URL"),
        ('grants = [{group = "g", tenant = "a", role = "job"}]', "no role job"),
        ('grants = [{group = "g", tenant = "a", role = "king"}]', "cannot be used"),
        ('grants = [{group = "g", tenant = "a", role = "operator"}]', "are admin or member"),
        ('grants = [{group = "g", tenant = "operator", role = "member"}]', "operator or viewer"),
        ('client_id = ""\nelse = 1', "cannot be used"),
    ],
)
def test_settings_that_are_wrong_are_refused(tmp_path: Path, line: str, message: str) -> None:
    right = {
        "issuer": 'issuer = "https://id.example"',
        "client_id": 'client_id = "page"',
        "public_url": 'public_url = "https://plexrl.example"',
        "grants": 'grants = [{group = "g", tenant = "a", role = "member"}]',
    }
    file = tmp_path / "oidc.toml"
    file.write_text("\n".join(right.values()))
    assert read_oidc(str(file)).grants[0].role is AccessRole.MEMBER
    right[line.partition(" ")[0]] = line
    file.write_text("\n".join(right.values()))
    with pytest.raises(InvalidRequestError, match=message):
        read_oidc(str(file))
