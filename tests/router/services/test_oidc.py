"""An ID token counts only if everything about it is right."""

import asyncio
import base64
import hmac
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

from plexrl.access import AccessRole
from plexrl.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    UnavailableError,
)
from plexrl.router.services.authentication import Caller
from plexrl.router.services.oidc import (
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
    readable_by_others = {"issuer": ISSUER, "jwks_uri": "http://id.example/jwks"}
    found = provider(**{"/.well-known/openid-configuration": readable_by_others})
    with pytest.raises(PlexRLError):
        caller(token(), provider=found)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('issuer = "http://id.example"', "no https URL"),
        ('public_url = "ftp://plexrl.example"', "no https URL"),
        ('grants = [{group = "g", tenant = "a", role = "job"}]', "no role job"),
        ('grants = [{group = "g", tenant = "a", role = "king"}]', "cannot be used"),
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
