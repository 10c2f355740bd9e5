"""Who sends a request: API keys, and for a while what the scheduler said about them."""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plexrl.errors import AuthenticationError
from plexrl.wire.rpc import Peer

if TYPE_CHECKING:
    from plexrl.router.execution.scheduler_link import SchedulerLink

Plain = dict[str, Any]
CACHE_S = 60.0
CACHE_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key a request carries."""

    tenant: str
    is_operator: bool
    controller: str = ""
    """Token of the controller that sent the request; empty: it names none."""

    @property
    def scope(self) -> str | None:
        """The tenant whose objects the caller may see; None sees all."""
        return None if self.is_operator else self.tenant

    @property
    def claim(self) -> Plain:
        """What a call to the scheduler says about whom it is made for, and by which controller."""
        if not self.controller:
            return self.rights
        return {**self.rights, "controller": self.controller}

    @property
    def rights(self) -> Plain:
        """`claim` for a question about a job that need not be the controller's own."""
        if self.is_operator:
            return {"tenant": None, "as_operator": True}
        return {"tenant": self.tenant}


class Callers:
    """Asks the scheduler who holds a key and remembers the answer for `CACHE_S` seconds.

    The scheduler says when a key was revoked, and everything is forgotten then. It is forgotten too
    when the connection to the scheduler ends, because nothing would be heard until the next one.
    """

    def __init__(self) -> None:
        self.scheduler: SchedulerLink | None = None
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()
        self._forgotten = 0
        """How often everything was forgotten. An answer that was asked for before that may be older
        than a revocation, so it is not remembered."""

    async def of_key(self, key: str) -> Caller:
        """Who holds this key. Raises `AuthenticationError`."""
        digest = key_digest(key)
        known = self._known.get(digest)
        if known is not None and time.monotonic() - known[0] < CACHE_S:
            return known[1]
        forgotten = self._forgotten
        assert self.scheduler is not None
        answer = await self.scheduler.call("authenticate", {"key_digest": digest})
        caller = Caller(answer["tenant"], bool(answer["is_operator"]))
        if forgotten == self._forgotten:
            self._known[digest] = (time.monotonic(), caller)
            while len(self._known) > CACHE_MAX:
                self._known.popitem(last=False)
        return caller

    def forget(self) -> None:
        """Ask the scheduler about every key anew."""
        self._known.clear()
        self._forgotten += 1

    async def on_forget(self, _: Peer, __: Plain) -> Plain:
        """The scheduler's call `forget_callers`."""
        self.forget()
        return {}


def bearer_key(authorization: str) -> str:
    """The API key in a request's `Authorization` header.

    Raises:
        AuthenticationError: there is none.
    """
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise AuthenticationError(
            "the request carries no API key: send `Authorization: Bearer <key>`"
        )
    return key


def key_digest(key: str) -> str:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()
