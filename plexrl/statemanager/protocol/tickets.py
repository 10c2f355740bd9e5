"""Tickets: signed claims that say what the holder of a connection may request.

A ticket is an HMAC-SHA256 of its claims, followed by the claims (msgpack). A process that can read
the node's key can mint tickets: only the daemon's own user can. The node agent runs as that user
and gives each worker a ticket at launch. The daemon keeps no list, so a ticket stays valid when
the daemon restarts, until the key changes.

Invariants:

- A worker's ticket is for one rank of one deployment and gives no access to another job.
- An agent's ticket is for all state of the node.
- A ticket of a rank's later incarnation revokes those of earlier incarnations.
"""

import hashlib
import hmac
from enum import StrEnum

import msgspec

from plexrl.errors import AuthenticationError, InvalidRequestError, PermissionDeniedError

KEY_BYTES = 32
TICKET_BYTES_MAX = 64 << 10
_MAC_BYTES = hashlib.sha256().digest_size


class TicketRole(StrEnum):
    """Role of a connection's client."""

    WORKER = "worker"
    AGENT = "agent"


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The claims of a ticket. An agent's ticket contains only the role."""

    role: TicketRole
    tenant: str = ""
    """Empty: the operator."""
    job: str = ""
    deployment: str = ""
    rank: int = 0
    world_size: int = 1
    group: str = ""
    incarnation: int = 0
    """Launch number of the deployment."""
    may_pull: tuple[str, ...] | None = None
    """Deployments of the same job whose published versions it may read; absent: all."""

    def __post_init__(self) -> None:
        if self.role == TicketRole.AGENT:
            return
        if not self.job or job_of(self.deployment) != self.job:
            raise InvalidRequestError(
                f"deployment {self.deployment!r} is not of job {self.job!r}: a worker's ticket "
                "names a job and one of its deployments"
            )
        if not 0 <= self.rank < self.world_size:
            raise InvalidRequestError(
                f"rank {self.rank} is not below the world size {self.world_size}"
            )
        foreign = [name for name in self.may_pull or () if job_of(name) != self.job]
        if foreign:
            raise InvalidRequestError(f"{foreign[0]!r} is not a deployment of job {self.job!r}")

    @property
    def holder(self) -> str:
        """Name of the holder, for messages."""
        if self.role == TicketRole.AGENT:
            return "the node agent"
        return f"rank {self.rank} of {self.deployment!r}"

    def check_may_pull(self, source: str) -> None:
        """Check that the holder may read what `source` published.

        Raises:
            PermissionDeniedError: the ticket does not allow it.
        """
        if self.role == TicketRole.AGENT:
            return
        if job_of(source) != self.job:
            raise PermissionDeniedError(
                f"{self.holder} may pull only from deployments of job {self.job!r}, and "
                f"{source!r} is not one of them"
            )
        if self.may_pull is not None and source not in (*self.may_pull, self.deployment):
            raise PermissionDeniedError(
                f"{self.holder} may pull from {', '.join(self.may_pull) or 'itself only'}, not "
                f"from {source!r}"
            )


AGENT = Claims(role=TicketRole.AGENT)


class TicketKey:
    """The secret of a node, or of several nodes that accept each other's tickets."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < KEY_BYTES:
            raise InvalidRequestError(
                f"a ticket key has at least {KEY_BYTES} bytes, not {len(secret)}: remove the file, "
                "and the StateManager creates a new one"
            )
        self._secret = secret

    def mint(self, claims: Claims) -> bytes:
        """A signed ticket with these claims."""
        body = msgspec.msgpack.encode(claims)
        return self.sign(body) + body

    def verify(self, ticket: bytes) -> Claims:
        """The claims of a ticket.

        Raises:
            AuthenticationError: its signature is not by this key.
        """
        mac, body = split(ticket)
        if len(ticket) > TICKET_BYTES_MAX or not hmac.compare_digest(mac, self.sign(body)):
            raise AuthenticationError(
                "the ticket was not signed with this node's key: use the one that the node agent "
                "gave to this worker, or have it mint another"
            )
        return self.claims_of(body)

    def claims_of(self, body: bytes) -> Claims:
        """The claims in the signed part of a ticket; the caller checks the signature.

        Raises:
            AuthenticationError: they cannot be decoded.
        """
        try:
            return msgspec.msgpack.decode(body, type=Claims)
        except msgspec.MsgspecError as error:
            # The signature is valid, so another release minted the ticket.
            raise AuthenticationError(
                f"this release cannot decode the ticket ({error}): restart the node "
                "agent and its workers"
            ) from error

    def sign(self, body: bytes) -> bytes:
        """The signature at the start of a ticket with these claims."""
        return hmac.digest(self._secret, body, "sha256")


def split(ticket: bytes) -> tuple[bytes, bytes]:
    """(signature, signed claims)."""
    return ticket[:_MAC_BYTES], ticket[_MAC_BYTES:]


def job_of(deployment: str) -> str:
    """The job of a deployment named `<job>/<name>`."""
    return deployment.rpartition("/")[0]
