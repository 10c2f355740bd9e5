"""API keys: who sends a request, with a cache of the scheduler's replies."""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plexrl.access import OPERATORS, AccessRole, KeyOwnerView, KeyScope
from plexrl.errors import AuthenticationError, PermissionDeniedError
from plexrl.router.server.refused_keys import RefusedKeys
from plexrl.scheduler.accounting.tenants import key_id
from plexrl.wire import scheduler_methods as m
from plexrl.wire.links.handshakes import client_network
from plexrl.wire.rpc import Peer

if TYPE_CHECKING:
    from fastapi import Request

    from plexrl.router.execution.scheduler_link import SchedulerLink
    from plexrl.router.services.oidc import Provider

LOG = logging.getLogger(__name__)

CACHE_S = 60.0
CACHE_MAX = 10_000
PAGE_HEADER = "plexrl-page"
SESSION_COOKIE = "plexrl-session"
"""Without the prefix that `Provider.cookie` adds."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: the owner of its key."""

    tenant: str
    role: AccessRole
    controller: str = ""
    """Token of the controller that sent the request; empty: the request has none."""
    key: str = ""
    """Id of the key."""
    job: str | None = None
    """The only job that the key opens, by its OpenAI-compatible endpoints; None: a tenant's key."""

    user: str = ""
    """Who answers for what the key does; empty: nobody in particular."""
    key_scope: KeyScope = KeyScope.ALL

    @property
    def is_operator(self) -> bool:
        """Whether the caller may change everything."""
        return self.role is AccessRole.OPERATOR

    @property
    def sees_all(self) -> bool:
        """Whether the caller sees the objects of all tenants, and what concerns operators only."""
        return self.role in OPERATORS

    @property
    def scope(self) -> str | None:
        """The tenant whose objects the caller may see; None sees all."""
        return None if self.sees_all else self.tenant

    @property
    def claim(self) -> dict[str, Any]:
        """Fields of a scheduler call that identify the caller and its controller."""
        if not self.controller:
            return self.rights
        return {**self.rights, "controller": self.controller}

    @property
    def rights(self) -> dict[str, Any]:
        """Like `claim` but without the controller, for calls about a job that another controller
        may have."""
        if self.sees_all:
            # The table lets a viewer call what changes nothing only.
            return {"tenant": None, "as_operator": True}
        return {"tenant": self.tenant}

    @property
    def management(self) -> dict[str, Any]:
        """Fields of a scheduler call about a tenant's keys."""
        return {**self.rights, "by_admin": self.role is AccessRole.ADMIN}


class KeyCache:
    """Looks API keys up at the scheduler and caches the replies for `CACHE_S` seconds.

    The scheduler reports each revocation; the cache is cleared then. The cache is also cleared when
    the connection to the scheduler ends, because no report arrives until the next connection.
    """

    def __init__(self, refused: RefusedKeys) -> None:
        self.scheduler: SchedulerLink | None = None
        self.provider: Provider | None = None
        """The identity provider whose users have access; None: there is none."""
        self.refused = refused
        self._callers: OrderedDict[str, tuple[float, Caller]] = OrderedDict()
        """By digest of the key: until when the entry holds, by the monotonic clock, and the
        caller."""
        self._clear_count = 0
        """Number of clears. A reply to a request sent before the last clear may be older than a
        revocation and is not cached."""

    def authorization_of(self, request: "Request") -> str:
        """The `Authorization` header of a request, or that of the user who has logged in on the
        page.

        Only the page's own scripts can send the header `PlexRL-Page`: another site would have to
        ask first (CORS), and gets no answer. So no other site makes requests in the user's name.
        """
        header: str = request.headers.get("authorization", "")
        if header or PAGE_HEADER not in request.headers or self.provider is None:
            return header
        token = request.cookies.get(self.provider.cookie(SESSION_COOKIE))
        return f"Bearer {token}" if token else ""

    async def caller_of(self, authorization: str, address: str) -> Caller:
        """Return who owns the key in an `Authorization` header from a client's address.

        Raises:
            AuthenticationError: the header has no key, or an unknown one.
            OverloadedError: too many such requests came from the address.
        """
        network = client_network(address)
        try:
            return await self._caller_of(bearer_key(authorization), network)
        except AuthenticationError:
            self._count_refusal(network)
            raise

    @contextmanager
    def limited(self, address: str) -> Iterator[None]:
        """Limit logins as requests with unknown keys: each that is refused counts, because the
        identity provider was asked about it.

        Raises:
            OverloadedError: too many came from the address.
        """
        network = client_network(address)
        self.refused.check(network, time.monotonic())
        try:
            yield
        except (AuthenticationError, PermissionDeniedError):
            self._count_refusal(network)
            raise

    def _count_refusal(self, network: str) -> None:
        if (text := self.refused.add(network, time.monotonic())) is not None:
            LOG.warning("%s", text)

    async def _caller_of(self, key: str, network: str) -> Caller:
        digest = key_digest(key)
        entry = self._callers.get(digest)
        if entry is not None and time.monotonic() < entry[0]:
            return entry[1]
        self.refused.check(network, time.monotonic())
        clear_count = self._clear_count
        assert self.scheduler is not None
        asked_at = time.monotonic()
        if self.provider is not None and is_id_token(key):
            caller, left_s = await self.provider.caller(key)
            self._callers[digest] = (asked_at + min(CACHE_S, left_s), caller)
            self._drop_oldest()
            return caller
        reply = await self.scheduler.call(m.AUTHENTICATE, {"key_digest": digest})
        caller = _caller(reply, digest)
        valid_s = reply.get("valid_s")
        until = asked_at + (CACHE_S if valid_s is None else min(CACHE_S, valid_s))
        # A job's key is not valid any more once the job has ended, which no report says.
        if clear_count == self._clear_count and caller.job is None:
            self._callers[digest] = (until, caller)
            self._drop_oldest()
        return caller

    def _drop_oldest(self) -> None:
        while len(self._callers) > CACHE_MAX:
            self._callers.popitem(last=False)

    def clear(self) -> None:
        """Drop all entries."""
        self._callers.clear()
        self._clear_count += 1

    async def on_forget(self, _: Peer, __: Mapping[str, Any]) -> None:
        """Handle the scheduler's call `forget_callers`."""
        self.clear()


def bearer_key(authorization: str) -> str:
    """The API key in a request's `Authorization` header.

    Raises:
        AuthenticationError: the header has none.
    """
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationError(
            "the request carries no API key: send `Authorization: Bearer <key>`"
        )
    return key


def is_id_token(key: str) -> bool:
    """Whether a bearer token is an ID token, not an API key."""
    return key.count(".") == 2 and key.startswith("ey")


def key_digest(key: str) -> str:
    """The SHA-256 digest of an API key, which is what the scheduler stores."""
    return hashlib.sha256(key.encode()).hexdigest()


def _caller(reply: KeyOwnerView, digest: str) -> Caller:
    """The owner of a key. A scheduler of an earlier version names no role."""
    job = reply.get("job")
    plain = AccessRole.OPERATOR if reply["is_operator"] else AccessRole.MEMBER
    return Caller(
        reply["tenant"],
        AccessRole(reply.get("role", plain if job is None else AccessRole.JOB)),
        key=key_id(digest),
        job=job,
        user=reply.get("user", ""),
        key_scope=KeyScope(reply.get("scope", KeyScope.ALL)),
    )
