"""Who asks, and what of the daemon serves it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

from plexrl.errors import AuthenticationError, OverloadedError, PermissionDeniedError
from plexrl.statemanager.checkpoint.jobs import CheckpointJobs
from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.statemanager.daemon.fencing import Fencing
from plexrl.statemanager.daemon.incarnations import Incarnations
from plexrl.statemanager.daemon.registry import Registration, Registry
from plexrl.statemanager.device.backend import DeviceBackend
from plexrl.statemanager.device.shared_bases import SharedBases
from plexrl.statemanager.eviction.policy import TierName
from plexrl.statemanager.eviction.prefetch import Prefetcher
from plexrl.statemanager.observe.counters import Tally
from plexrl.statemanager.protocol.messages import Answer, Request
from plexrl.statemanager.protocol.tickets import Claims, Role, TicketKey
from plexrl.statemanager.store.store import Store, StoredVersion
from plexrl.statemanager.store.versions.earlier_versions import EarlierVersions
from plexrl.statemanager.transfer.copy.fair_queue import MoveLine
from plexrl.statemanager.transfer.relayout_load import Relayouter

RequestT = TypeVar("RequestT", bound=Request)

OPENED_MAX = 64
"""Versions held in place for one connection: what is held cannot be dropped."""

_ROLES = {Role.AGENT: "the node agent", Role.WORKER: "workers, for their own state"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every connection of a daemon shares; each part is thread-safe."""

    config: StateManagerConfig
    store: Store
    registry: Registry
    fencing: Fencing
    relayouter: Relayouter
    prefetcher: Prefetcher
    checkpoints: CheckpointJobs
    devices: DeviceBackend
    key: TicketKey
    incarnations: Incarnations
    line: MoveLine
    tally: Tally
    bases: SharedBases
    earlier: EarlierVersions
    life: str
    """Differs between two runs of a daemon."""


@dataclass(slots=True, kw_only=True)
class Caller:
    """The client of one connection. Its own thread's only."""

    services: Services
    uid: int
    """Of the process at the other end, by the kernel's word."""
    said: Claims | None = None
    """What its ticket says; absent: it has shown none yet."""
    own: Registration | None = None
    """The rank that registered on this connection; absent: none did, or not yet."""
    opened: int = 0
    """Versions that it asked to be held in place."""
    leases: ExitStack = field(default_factory=ExitStack)
    """Versions held in place for this client, until it goes."""
    base_user: object = field(default_factory=object)
    """What this connection is called among the users of a base."""

    def registered(self) -> Registration:
        """The rank whose state this client may move.

        Raises:
            PermissionDeniedError: it has registered none.
        """
        if self.own is None:
            raise PermissionDeniedError("register an arena on this connection first")
        return self.own

    @property
    def claims(self) -> Claims:
        """What its ticket says.

        Raises:
            AuthenticationError: it has shown none.
        """
        if self.said is None:
            raise AuthenticationError("the first request of a connection is Hello, with a ticket")
        return self.said

    def count_open(self) -> None:
        """Note that one more version is to be held in place for it.

        Raises:
            OverloadedError: it has as many as one connection may.
        """
        if self.opened >= OPENED_MAX:
            raise OverloadedError(
                f"{self.claims.holder} holds {self.opened} versions on this connection: close it "
                "and open another",
                retry_after_s=0.0,
            )
        self.opened += 1

    def refuse(self, roles: tuple[Role, ...], request: Request) -> NoReturn:
        """Refuse a request that is for others.

        Raises:
            AuthenticationError: it has shown no ticket.
            PermissionDeniedError: its role is not among `roles`.
        """
        claims = self.claims
        raise PermissionDeniedError(
            f"{type(request).__name__} is not for {claims.holder}: it is for {_ROLES[roles[0]]}",
            role=claims.role.value,
        )

    def close(self) -> None:
        """The client is gone: forget its arena and let go of what it reads."""
        self.leases.close()
        self.services.bases.forget(self.base_user)
        if self.own is not None:
            self.services.registry.remove(self.own)


class Reply(NamedTuple):
    """What comes of a request. Whoever sends it closes the descriptors."""

    answer: Answer
    fds: Sequence[int] = ()


AnyHandler = Callable[[Caller, Any, Sequence[int]], Reply]
"""Carries out requests of one type. The descriptors that came with one are the session's: a handler
duplicates what it keeps."""


class Entry(NamedTuple):
    """A row of the table of handlers."""

    kind: type[Request]
    handler: AnyHandler
    roles: tuple[Role, ...]
    """Whose tickets it is for; none: also for those who have shown no ticket yet."""
    is_move: bool
    """Whether it moves state, and so takes its turn in the line."""


WORKERS = (Role.WORKER,)
AGENTS = (Role.AGENT,)
TICKETS = (Role.WORKER, Role.AGENT)


def handles(
    kind: type[RequestT],
    handler: Callable[[Caller, RequestT, Sequence[int]], Reply],
    roles: tuple[Role, ...],
    *,
    is_move: bool = False,
) -> Entry:
    """A row of the table; request and handler must agree.

    A handler for workers must see to it that the request names nothing but what the caller's ticket
    is for.
    """
    return Entry(kind, handler, roles, is_move)


def move_report(nbytes: int, seconds: float, tier: TierName) -> Answer:
    """What a `MoveReport` is made from at the client."""
    return {"bytes_moved": nbytes, "seconds": seconds, "tier": tier.value}


def names_of(versions: Sequence[StoredVersion]) -> list[str]:
    """The names that the store knows them by."""
    return [version.manifest.name for version in versions]
