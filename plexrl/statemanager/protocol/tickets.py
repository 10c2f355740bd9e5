"""Tickets: what the holder of a connection may ask for, signed by the node.

A ticket is an HMAC-SHA256 of its claims, then the claims (msgpack). Whoever can read the node's key
mints them: the daemon's own user, thus the node agent, which hands each worker one at its launch.
The daemon keeps no list, so a ticket outlives its restarts; it ends with the key.

Laws:

- A worker's ticket is for one rank of one deployment, and lets nothing of another job be named.
- An agent's ticket is for every state of the node.
- Of one rank, a ticket of a later incarnation ends those of earlier ones.
"""

import hashlib
import hmac
from enum import StrEnum

import msgspec

from plexrl.errors import AuthenticationError, InvalidRequestError, PermissionDeniedError

KEY_BYTES = 32
TICKET_BYTES_MAX = 64 << 10
_MAC_BYTES = hashlib.sha256().digest_size


class Role(StrEnum):
    """Whose connection it is."""

    WORKER = "worker"
    AGENT = "agent"


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a ticket says of its holder. An agent's says no more than the role."""

    role: Role
    tenant: str = ""
    """Empty: the operator's own."""
    job: str = ""
    deployment: str = ""
    rank: int = 0
    world_size: int = 1
    group: str = ""
    incarnation: int = 0
    """Grows with every launch of the deployment."""
    may_pull: tuple[str, ...] | None = None
    """Deployments of the same job whose published versions it may read; absent: all of them."""

    def __post_init__(self) -> None:
        if self.role == Role.AGENT:
            return
        if not self.job or job_of(self.deployment) != self.job:
            raise InvalidRequestError(
                f"deployment {self.deployment!r} is none of job {self.job!r}: a worker's ticket "
                "names both"
            )
        if not 0 <= self.rank < self.world_size:
            raise InvalidRequestError(f"there is no rank {self.rank} of {self.world_size}")
        foreign = [name for name in self.may_pull or () if job_of(name) != self.job]
        if foreign:
            raise InvalidRequestError(f"{foreign[0]!r} is no deployment of job {self.job!r}")

    @property
    def holder(self) -> str:
        """Who it is, for messages."""
        if self.role == Role.AGENT:
            return "the node agent"
        return f"rank {self.rank} of {self.deployment!r}"

    def check_may_pull(self, source: str) -> None:
        """Refuse another job's published versions, and those the ticket does not name.

        Raises:
            PermissionDeniedError: the ticket does not let its holder read `source`.
        """
        if self.role == Role.AGENT:
            return
        if job_of(source) != self.job:
            raise PermissionDeniedError(
                f"{self.holder} may pull what deployments of job {self.job!r} published, and "
                f"{source!r} is none of them"
            )
        if self.may_pull is not None and source not in (*self.may_pull, self.deployment):
            raise PermissionDeniedError(
                f"{self.holder} may pull from {', '.join(self.may_pull) or 'itself only'}, not "
                f"from {source!r}"
            )


AGENT = Claims(role=Role.AGENT)


class TicketKey:
    """The secret of a node, or of several nodes that take each other's tickets."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < KEY_BYTES:
            raise InvalidRequestError(
                f"a ticket key has at least {KEY_BYTES} bytes, not {len(secret)}: remove the file, "
                "and the StateManager makes another"
            )
        self._secret = secret

    def mint(self, claims: Claims) -> bytes:
        """A ticket that says `claims`."""
        body = msgspec.msgpack.encode(claims)
        return self.sign(body) + body

    def verify(self, ticket: bytes) -> Claims:
        """What a ticket says.

        Raises:
            AuthenticationError: it was not minted with this key, or has been changed since.
        """
        mac, body = split(ticket)
        if len(ticket) > TICKET_BYTES_MAX or not hmac.compare_digest(mac, self.sign(body)):
            raise AuthenticationError(
                "the ticket is not of this node's key: use the one that the node agent gave to "
                "this worker, or have it mint another"
            )
        return self.claims_of(body)

    def claims_of(self, body: bytes) -> Claims:
        """What the signed part of a ticket says; its signature is the caller's to check.

        Raises:
            AuthenticationError: it cannot be read.
        """
        try:
            return msgspec.msgpack.decode(body, type=Claims)
        except msgspec.MsgspecError as error:
            # Rightly signed, so it is another release's.
            raise AuthenticationError(
                f"the ticket says what this release does not know ({error}): restart the node "
                "agent and its workers"
            ) from error

    def sign(self, body: bytes) -> bytes:
        """The signature that a ticket of these claims begins with."""
        return hmac.digest(self._secret, body, "sha256")


def split(ticket: bytes) -> tuple[bytes, bytes]:
    """(signature, signed claims)."""
    return ticket[:_MAC_BYTES], ticket[_MAC_BYTES:]


def job_of(deployment: str) -> str:
    """The job that a deployment belongs to: `<job>/<name>`."""
    return deployment.rpartition("/")[0]
