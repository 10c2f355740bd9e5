"""The client of a connection, the services of the daemon, and the rows of the handler table."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

from plexrl.errors import AuthenticationError, DeviceError, OverloadedError, PermissionDeniedError
from plexrl.statemanager.bytes.fair_queue import FairQueue
from plexrl.statemanager.checkpoint.jobs import CheckpointJobs
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.daemon.memory.prefetch import ArenaPrefetcher
from plexrl.statemanager.daemon.registry.fencing import Fencing
from plexrl.statemanager.daemon.registry.incarnations import Incarnations
from plexrl.statemanager.daemon.registry.registry import Registration, Registry
from plexrl.statemanager.device.backend import DeviceBackend
from plexrl.statemanager.device.frozen_weights import FrozenWeightsCache
from plexrl.statemanager.observe.counters import Counters
from plexrl.statemanager.protocol.messages import Answer, Request
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.protocol.tickets import Claims, TicketKey, TicketRole
from plexrl.statemanager.store.background.earlier_versions import EarlierVersions
from plexrl.statemanager.store.background.prefetch import Prefetcher
from plexrl.statemanager.store.store import Store, TieredVersion
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.transfer.relayout_load import Relayouter
from plexrl.statemanager.transfer.replicas import Replicas

RequestT = TypeVar("RequestT", bound=Request)

OPENED_MAX = 64
"""Versions leased to one connection: a leased version cannot be dropped."""

_ROLES = {TicketRole.AGENT: "the node agent", TicketRole.WORKER: "workers, for their own state"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of the daemon that all connections share. Each part is thread-safe."""

    config: StateManagerConfig
    store: Store
    registry: Registry
    fencing: Fencing
    relayouter: Relayouter
    prefetcher: Prefetcher
    arena_prefetcher: ArenaPrefetcher
    replicas: Replicas
    checkpoints: CheckpointJobs
    devices: DeviceBackend
    key: TicketKey
    network: Network
    incarnations: Incarnations
    move_queue: FairQueue
    counters: Counters
    frozen_weights: FrozenWeightsCache
    earlier_versions: EarlierVersions
    run_id: str
    """Unique to this run of the daemon."""


@dataclass(slots=True, kw_only=True)
class DaemonCaller:
    """The client of one connection. Only the connection's thread uses it."""

    services: Services
    uid: int
    """User of the client process, as the kernel reports it."""
    pid: int = 0
    """Id of the client process; 0: unknown."""
    shown_claims: Claims | None = None
    """Claims of the ticket; absent until the client shows a ticket."""
    registration: Registration | None = None
    """The rank that registered on this connection; absent until one registers."""
    opened: int = 0
    """Versions leased at the client's request."""
    leases: ExitStack = field(default_factory=ExitStack)
    """Leases of the versions that the client reads; they end with the connection."""
    weights_user: object = field(default_factory=object)
    """Identity of this connection among the users of frozen weights."""

    def registered(self) -> Registration:
        """The rank whose state this client may move.

        Raises:
            PermissionDeniedError: the client registered no rank.
        """
        if self.registration is None:
            raise PermissionDeniedError("register an arena on this connection first")
        return self.registration

    @property
    def claims(self) -> Claims:
        """Claims of the ticket.

        Raises:
            AuthenticationError: the client has shown no ticket.
        """
        if self.shown_claims is None:
            raise AuthenticationError("the first request of a connection is Hello, with a ticket")
        return self.shown_claims

    def check_group(self, group: str) -> None:
        """Refuse a group other than the one that the ticket names.

        Raises:
            PermissionDeniedError: it is another one.
        """
        claims = self.claims
        if claims.group and group != claims.group:
            raise PermissionDeniedError(
                f"the ticket of {claims.holder} names group {claims.group!r}, not {group!r}: have "
                "the node agent restart the worker"
            )

    def count_open(self) -> None:
        """Count one more leased version.

        Raises:
            OverloadedError: the connection has as many as it may.
        """
        if self.opened >= OPENED_MAX:
            raise OverloadedError(
                f"{self.claims.holder} holds {self.opened} versions on this connection: close it "
                "and open another",
                retry_after_s=0.0,
            )
        self.opened += 1

    def refuse(self, roles: tuple[TicketRole, ...], request: Request) -> NoReturn:
        """Refuse a request that this client's role may not send.

        Raises:
            AuthenticationError: the client has shown no ticket.
            PermissionDeniedError: the role is not among `roles`.
        """
        claims = self.claims
        raise PermissionDeniedError(
            f"{claims.holder} may not send {type(request).__name__}: it is for {_ROLES[roles[0]]}",
            role=claims.role.value,
        )

    def close(self) -> None:
        """End the client's leases and registration."""
        self.leases.close()
        self.services.frozen_weights.forget(self.weights_user)
        if self.registration is not None:
            self.services.registry.remove(self.registration)
            device = self.registration.device
            if not self.services.registry.on_device(device):
                # A device that fails has no memory to give.
                with suppress(DeviceError):
                    self.services.devices.release_idle(device)


class DaemonReply(NamedTuple):
    """The answer to a request. The sender of the reply closes the descriptors."""

    answer: Answer
    fds: Sequence[int] = ()


AnyHandler = Callable[[DaemonCaller, Any, Sequence[int]], DaemonReply]
"""Handles requests of one type. The session closes the descriptors that came with a request, so a
handler duplicates those that it keeps."""


class RequestEntry(NamedTuple):
    """A row of the handler table."""

    kind: type[Request]
    handler: AnyHandler
    roles: tuple[TicketRole, ...]
    """Roles that may send the request; empty: also clients without a ticket."""
    is_move: bool
    """Whether the request moves state; such requests wait in the move queue."""


WORKERS = (TicketRole.WORKER,)
AGENTS = (TicketRole.AGENT,)
TICKETS = (TicketRole.WORKER, TicketRole.AGENT)


def handles(
    kind: type[RequestT],
    handler: Callable[[DaemonCaller, RequestT, Sequence[int]], DaemonReply],
    roles: tuple[TicketRole, ...],
    *,
    is_move: bool = False,
) -> RequestEntry:
    """A row of the handler table; the types of request and handler must agree.

    A handler for workers must check that the request names nothing beyond the caller's ticket.
    """
    return RequestEntry(kind, handler, roles, is_move)


def move_report(nbytes: int, seconds: float, tier: TierName) -> Answer:
    """The fields from which the client builds a `MoveReport`."""
    return {"bytes_moved": nbytes, "seconds": seconds, "tier": tier.value}


def names_of(versions: Sequence[TieredVersion]) -> list[str]:
    """Names of the versions in the store."""
    return [version.manifest.name for version in versions]
