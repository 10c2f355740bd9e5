"""Who asks, and what of the daemon serves it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from plexrl.errors import PermissionDeniedError
from plexrl.statemanager.checkpoint.jobs import CheckpointJobs
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.backend import DeviceBackend
from plexrl.statemanager.fencing import Fencing
from plexrl.statemanager.prefetch import Prefetcher
from plexrl.statemanager.protocol import Answer, Request
from plexrl.statemanager.registry import Registration, Registry
from plexrl.statemanager.residency import TierName
from plexrl.statemanager.store import Store, StoredVersion

RequestT = TypeVar("RequestT", bound=Request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every connection of a daemon shares; each part is thread-safe."""

    config: StateManagerConfig
    store: Store
    registry: Registry
    fencing: Fencing
    prefetcher: Prefetcher
    checkpoints: CheckpointJobs
    devices: DeviceBackend


@dataclass(slots=True, kw_only=True)
class Caller:
    """The client of one connection. Its own thread's only."""

    services: Services
    uid: int
    """The user that the client's process runs as."""
    own: Registration | None = None
    """The rank that registered on this connection; absent: none did, or not yet."""
    leases: ExitStack = field(default_factory=ExitStack)
    """Versions held in place for this client, until it goes."""

    def registered(self) -> Registration:
        """The rank whose state this client may move.

        Raises:
            PermissionDeniedError: it has registered none.
        """
        if self.own is None:
            raise PermissionDeniedError("register an arena on this connection first")
        return self.own

    def check_is_agent(self) -> None:
        """Refuse what only the node agent may ask for.

        Raises:
            PermissionDeniedError: this is a rank's connection.
        """
        if self.own is not None:
            raise PermissionDeniedError(
                f"this connection is rank {self.own.rank}'s of {self.own.deployment!r}: only the "
                "node agent moves versions between nodes"
            )

    def close(self) -> None:
        """The client is gone: forget its arena and let go of what it reads."""
        self.leases.close()
        if self.own is not None:
            self.services.registry.remove(self.own)


class Reply(NamedTuple):
    """What comes of a request. Whoever sends it closes the descriptors."""

    answer: Answer
    fds: Sequence[int] = ()


AnyHandler = Callable[[Caller, Any, Sequence[int]], Reply]
"""Carries out requests of one type. The descriptors that came with one are the session's: a handler
duplicates what it keeps."""

Entry = tuple[type[Request], AnyHandler]


def handles(
    kind: type[RequestT], handler: Callable[[Caller, RequestT, Sequence[int]], Reply]
) -> Entry:
    """A row of the table of handlers; the types of the two must agree."""
    return kind, handler


def move_report(nbytes: int, seconds: float, tier: TierName) -> Answer:
    """What a `MoveReport` is made from at the client."""
    return {"bytes_moved": nbytes, "seconds": seconds, "tier": tier.value}


def names_of(versions: Sequence[StoredVersion]) -> list[str]:
    """The names that the store knows them by."""
    return [version.manifest.name for version in versions]
