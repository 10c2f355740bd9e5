"""Join tokens: what an operator gives to a machine that shall become a node.

A token is `plexrl1.FINGERPRINT.SECRET`. The fingerprint is the SHA-256 of the cluster's authority:
by it the machine knows the head before it sends the secret. The head stores a hash of the secret
only. A token admits a bounded number of nodes within a bounded time.
"""

import hashlib
import re
import secrets
import time
from dataclasses import dataclass

from plexrl.cluster.join.ledger import Ledger, Token
from plexrl.errors import InvalidRequestError, JoinTokenError, NotFoundError

VERSION = "plexrl1"
SECRET_BYTES = 32
ID_DIGITS = 12
"""Hexadecimal digits of the secret's hash that name a token in lists; they admit nobody."""
TTL_S = 3600.0
TTL_S_MAX = 30 * 86_400.0
USES_MAX = 10_000
KEPT_S = 86_400.0
"""Time for which a dead token is remembered, so that its use is refused with the reason."""
_TOKEN = re.compile(rf"{VERSION}\.([0-9a-f]{{64}})\.([A-Za-z0-9_-]{{20,128}})")


@dataclass(frozen=True, slots=True)
class JoinToken:
    """The parts of a token."""

    fingerprint: str
    """SHA-256 of the authority's certificate, in hexadecimal."""
    secret: str

    def __str__(self) -> str:
        return f"{VERSION}.{self.fingerprint}.{self.secret}"

    def __repr__(self) -> str:
        return f"JoinToken({self.fingerprint[:ID_DIGITS]}…)"


def parse_token(text: str) -> JoinToken:
    """The token in a text.

    Raises:
        JoinTokenError: the text is no token.
    """
    found = _TOKEN.fullmatch(text.strip())
    if found is None:
        raise JoinTokenError(
            f"this is no join token: a token is {VERSION}.<64 hexadecimal digits>.<secret>; run "
            "`plexrl node token` on the head and copy all of it",
            reason="malformed",
        )
    return JoinToken(found[1], found[2])


def create_token(
    ledger: Ledger, fingerprint: str, *, ttl_s: float = TTL_S, uses: int = 1
) -> tuple[JoinToken, Token]:
    """A new token and its entry in the ledger; it is durable when this returns.

    Raises:
        InvalidRequestError: `ttl_s` or `uses` is out of range.
    """
    if not 1 <= ttl_s <= TTL_S_MAX:
        raise InvalidRequestError(
            f"a token of {ttl_s:g} s: it may live for 1 s to {TTL_S_MAX / 86_400:g} days"
        )
    if not 1 <= uses <= USES_MAX:
        raise InvalidRequestError(f"{uses} uses: a token may admit 1 to {USES_MAX} nodes")
    secret = secrets.token_urlsafe(SECRET_BYTES)
    now = time.time()
    entry = Token(digest=secret_digest(secret), created_at=now, expires_at=now + ttl_s, uses=uses)
    with ledger.change() as members:
        members.tokens = [token for token in members.tokens if token.expires_at + KEPT_S > now]
        members.tokens.append(entry)
    return JoinToken(fingerprint, secret), entry


def revoke_token(ledger: Ledger, named: str) -> Token:
    """Revoke the token with this text or this id.

    Raises:
        NotFoundError: there is no such token.
    """
    found = _TOKEN.fullmatch(named.strip())
    digits = secret_digest(found[2]) if found is not None else named.strip().lower()
    with ledger.change() as members:
        for token in members.tokens:
            is_named = len(digits) >= ID_DIGITS and token.digest.startswith(digits)
            if is_named:
                token.is_revoked = True
                return token
    raise NotFoundError(
        f"there is no join token {digits[:ID_DIGITS]!r}: `plexrl node tokens` lists them"
    )


def token_id(token: Token) -> str:
    """The name of a token in lists."""
    return token.digest[:ID_DIGITS]


def secret_digest(secret: str) -> str:
    """The hash under which a secret is stored. The secret is random, so that it needs no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()
