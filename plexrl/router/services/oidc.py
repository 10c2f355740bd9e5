"""Users of an identity provider (OpenID Connect): their ID tokens, and what these entitle to.

A user logs in at the provider, by the authorization code flow with PKCE for the page and by the
device flow for the command line. Requests then carry the ID token, which says who the user is and
in which groups; a table in the settings turns a group into a tenant and a role. The router stores
nothing about a user.

A token counts if one of the provider's present keys has signed it with an asymmetric algorithm of
`ALGORITHMS`, if it is of this issuer, for one of this cluster's clients alone, and neither expired
nor of the future, within `skew_s`.
"""

import asyncio
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, KeySet

from plexrl.access import AccessRole, is_confidential, roles_of
from plexrl.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
    UnavailableError,
)
from plexrl.router.services.authentication import Caller

ALGORITHMS: Final = ["RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA"]
"""Without `none` and without HMAC, whose key would be one that clients know."""
TOKEN_BYTES_MAX = 16_384
KEYS_FRESH_S = 600.0
KEYS_RETRY_S = 2.0
"""Shortest time between two looks for a key that is not known, or after one that failed."""
TIMEOUT_S = 10.0
USER_CHARACTERS = "".join(map(chr, range(ord("!"), ord("~") + 1))).replace("%", "")
"""What stands for itself in the name of a user; all else is percent-encoded."""
USER_MAX = 200
OPERATOR = "operator"
"""The operator's tenant."""


class OidcGrant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the members of a group may do."""

    group: str
    tenant: str
    role: AccessRole


class OidcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The provider, and what its users may do (`oidc_file` of a router, TOML)."""

    issuer: str
    """URL of the provider, as its tokens name it."""
    client_id: str
    """The cluster's client: redirects to `public_url`/v1/login/callback."""
    public_url: str
    """URL at which browsers reach the routers."""
    grants: tuple[OidcGrant, ...]
    """In this order; the first one whose group the user is in decides."""
    client_secret_file: str = ""
    """File with the client's secret; empty: it is a public client."""
    cli_client_id: str = ""
    """Public client of the device flow; empty: `plexrl login` is not served."""
    groups_claim: str = "groups"
    user_claim: str = "sub"
    """Claim that names the user in logs and bills; an e-mail counts only if it is verified."""
    scope: str = "openid profile email groups offline_access"
    skew_s: float = 30.0
    """Difference of the clocks that is tolerated."""


def read_oidc(path: str) -> OidcConfig:
    """The settings in a file. Raises `InvalidRequestError`."""
    try:
        config = msgspec.convert(tomllib.loads(Path(path).read_text()), OidcConfig)
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"oidc_file {path} cannot be used: {error}") from error
    for url in (config.issuer, config.public_url):
        _check_url(url)
    for grant in config.grants:
        if grant.role is AccessRole.JOB:
            raise InvalidRequestError(f"oidc_file {path}: a user has no role {grant.role}")
        roles = roles_of(is_operator=grant.tenant == OPERATOR)
        if grant.role not in roles:
            raise InvalidRequestError(
                f"oidc_file {path}: users of tenant {grant.tenant!r} are {' or '.join(roles)}, not "
                f"{grant.role}"
            )
    return config


def _check_url(url: str) -> None:
    """Refuse to send secrets over a network that others read. Raises `InvalidRequestError`."""
    if not is_confidential(url):
        raise InvalidRequestError(f"{url!r} is no https URL: users log in over HTTPS only")


class Provider:
    """The identity provider of a cluster."""

    def __init__(self, config: OidcConfig, *, client: httpx.AsyncClient | None = None) -> None:
        self.config = config
        self.client = client or httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False)
        self._metadata: dict[str, Any] | None = None
        self._keys: KeySet | None = None
        self._read_at = self._tried_at = -KEYS_FRESH_S
        """When the keys were read last, and when a reading began, by the monotonic clock."""
        self._failure = ""
        """Why the last reading gave no keys; empty: it did."""
        self._lock = asyncio.Lock()

    @property
    def is_secure(self) -> bool:
        """Whether browsers reach the routers over HTTPS."""
        return self.config.public_url.startswith("https:")

    def cookie(self, name: str) -> str:
        """The full name of a cookie. Over HTTPS its prefix keeps other hosts of the same domain,
        which may be less careful, from setting it."""
        return f"__Host-{name}" if self.is_secure else name

    async def metadata(self) -> dict[str, Any]:
        """The provider's description of itself. Raises `UnavailableError`."""
        if self._metadata is None:
            url = f"{self.config.issuer.rstrip('/')}/.well-known/openid-configuration"
            found = await self.ask("GET", url)
            if found.get("issuer") != self.config.issuer:
                raise UnavailableError(
                    f"the identity provider at {url} says that it is {found.get('issuer')!r}"
                )
            self._metadata = found
        return self._metadata

    async def endpoint(self, name: str) -> str:
        """The URL that the provider's description has under a name. Raises `UnavailableError`: it
        has none, or one to which secrets would go over a network that others read."""
        url = (await self.metadata()).get(name)
        if not isinstance(url, str) or not is_confidential(url):
            raise UnavailableError(f"the identity provider's {name} is no https URL: {url!r}")
        return url

    async def ask(self, method: str, url: str, form: Mapping[str, str] | None = None) -> Any:
        """The JSON that the provider answers; an OAuth error is a `PermissionDeniedError`. Raises
        `UnavailableError`: it answers nothing that can be used."""
        try:
            reply = await self.client.request(method, url, data=form)
            body = reply.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise UnavailableError(f"the identity provider does not answer: {error!r}") from error
        if reply.status_code in (400, 401):
            raise PermissionDeniedError(f"the identity provider refused: {_error(body)}")
        if reply.status_code != 200 or not isinstance(body, dict):
            raise UnavailableError(f"the identity provider answers {reply.status_code}")
        return body

    async def revoke(self, form: Mapping[str, str]) -> None:
        """Revoke the token of a form, if the provider can. Raises `UnavailableError`."""
        if "revocation_endpoint" not in await self.metadata():
            return
        url = await self.endpoint("revocation_endpoint")
        try:
            (await self.client.post(url, data=form)).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(f"the identity provider does not revoke: {error!r}") from error

    async def caller(self, token: str, *, nonce: str | None = None) -> tuple[Caller, float]:
        """Who an ID token names, and for how many seconds more it counts. `nonce`: the one of the
        login that it ends.

        Raises:
            AuthenticationError: it does not count.
            PermissionDeniedError: no group of the user has a role.
            UnavailableError: the provider's keys cannot be read.
        """
        claims = await self._claims(token)
        if nonce is not None and claims.get("nonce") != nonce:
            raise AuthenticationError("the ID token is of another login: log in again")
        left_s = float(claims["exp"]) + self.config.skew_s - time.time()
        return self._entitled(claims), left_s

    async def _claims(self, token: str) -> dict[str, Any]:
        if len(token) > TOKEN_BYTES_MAX:
            raise AuthenticationError("the ID token is too long")
        keys = await self._key_set(KEYS_FRESH_S)
        # Anybody can send a token whose header is no sense: its errors are of many types.
        try:
            return self._checked(token, keys)
        except (JoseError, ValueError, TypeError, KeyError):
            # The provider may have a new key.
            newer = await self._key_set(KEYS_RETRY_S)
        try:
            return self._checked(token, newer)
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise AuthenticationError(
                f"the ID token does not count ({type(error).__name__}): log in again"
            ) from error

    def _checked(self, token: str, keys: KeySet) -> dict[str, Any]:
        claims = jwt.decode(token, keys, algorithms=ALGORITHMS).claims
        clients = {self.config.client_id, self.config.cli_client_id} - {""}
        registry = jwt.JWTClaimsRegistry(
            leeway=int(self.config.skew_s),
            iss={"essential": True, "value": self.config.issuer},
            sub={"essential": True},
            exp={"essential": True},
            iat={"essential": True},
        )
        registry.validate(claims)
        audience = claims.get("aud")
        named = {audience} if isinstance(audience, str) else set(audience or ())
        if not named or not named <= clients or claims.get("azp", next(iter(named))) not in clients:
            raise ValueError("another audience")
        return dict(claims)

    async def _key_set(self, fresh_s: float) -> KeySet:
        """The provider's keys, read at most `fresh_s` seconds ago. While a look for newer ones
        fails, those that are fresh enough for known users are kept, and it is not repeated at each
        request: anybody can send a token with an unknown key."""
        keys = self._fresh_keys(fresh_s)
        if keys is not None:
            return keys
        async with self._lock:
            if (keys := self._fresh_keys(fresh_s)) is not None:
                return keys
            if time.monotonic() - self._tried_at >= KEYS_RETRY_S:
                await self._read_keys()
            if (keys := self._fresh_keys(KEYS_FRESH_S)) is not None:
                return keys
        raise UnavailableError(self._failure)

    def _fresh_keys(self, fresh_s: float) -> KeySet | None:
        return self._keys if time.monotonic() - self._read_at < fresh_s else None

    async def _read_keys(self) -> None:
        try:
            found = await self.ask("GET", await self.endpoint("jwks_uri"))
            self._keys = _key_set(found.get("keys"))
        except (UnavailableError, PermissionDeniedError) as error:
            self._failure = error.message
        else:
            self._read_at = time.monotonic()
        # Its end counts, so that those who waited for it do not try one after the other.
        self._tried_at = time.monotonic()

    def _entitled(self, claims: Mapping[str, Any]) -> Caller:
        groups = claims.get(self.config.groups_claim, ())
        groups = [groups] if isinstance(groups, str) else groups
        if not isinstance(groups, list | tuple):
            groups = ()
        for grant in self.config.grants:
            if grant.group in groups:
                return Caller(grant.tenant, grant.role, user=self._user(claims), key="oidc")
        raise PermissionDeniedError("no group of yours has a role on this cluster: ask an operator")

    def _user(self, claims: Mapping[str, Any]) -> str:
        name = self.config.user_claim
        if name == "email" and claims.get("email_verified") is not True:
            name = "sub"
        # As names of the users of keys are: a run of the user gets a key in this name.
        return quote(str(claims.get(name) or claims["sub"]), safe=USER_CHARACTERS)[:USER_MAX]


def _key_set(found: object) -> KeySet:
    """The keys of a provider whose kind is known. Raises `UnavailableError`: there are none."""
    keys = []
    for each in found if isinstance(found, list) else ():
        with suppress(JoseError, ValueError, TypeError, KeyError):
            keys.append(JWKRegistry.import_key(dict(each)))
    if not keys:
        raise UnavailableError("the identity provider has no keys that can be used")
    return KeySet(keys)


def _error(body: object) -> str:
    return str(body.get("error", "no reason"))[:100] if isinstance(body, dict) else "no reason"
