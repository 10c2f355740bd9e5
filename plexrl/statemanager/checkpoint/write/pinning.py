"""Versions held in place for a checkpoint: this daemon's, and those of others on the machine.

Held are the bytes, not the name: a later save replaces or drops the version meanwhile, and what it
occupies counts in its tier until the checkpoint is written.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Protocol

import msgspec

from plexrl.errors import UnavailableError
from plexrl.statemanager.checkpoint.requests import PinnedVersion, PinVersions
from plexrl.statemanager.checkpoint.write.source import LeaseReader, RemoteReader, VersionReader
from plexrl.statemanager.client.connection import connect, exchange
from plexrl.statemanager.protocol.address import nearest
from plexrl.statemanager.protocol.channel import close_all
from plexrl.statemanager.protocol.messages import regions_of
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.lease import Lease
from plexrl.statemanager.store.versions.versions import VersionKind

TIMEOUT_S = 10.0
"""Of another StateManager's answer."""


class _Lend(Protocol):
    def __call__(self, name: str, description: str) -> AbstractContextManager[Lease]: ...


def pin_here(held: ExitStack, store: Store, deployment: str, seq: int) -> list[VersionReader]:
    """Readers of the versions that `store` has, for as long as `held` is open."""
    return [LeaseReader(lease) for lease in _leases(held, store, store.lease, deployment, seq)]


def pin_elsewhere(
    held: ExitStack, sources: Sequence[str], ticket: bytes, deployment: str, seq: int
) -> list[VersionReader]:
    """Readers of the versions that the StateManagers at `sources` have.

    `ticket` is an agent's, which all of them take; only this daemon's own user is shown it.

    Raises:
        PermissionDeniedError: another user listens at one of them.
        UnavailableError: one cannot be reached.
    """
    readers: list[VersionReader] = []
    request = PinVersions(deployment=deployment, seq=seq)
    # A worker may have named the sources.
    user = os.getuid()
    for path in dict.fromkeys(nearest(source) for source in sources):
        try:
            connection = held.enter_context(connect(path, TIMEOUT_S, ticket, of_user=user))
            answer, fds = exchange(connection, request)
        except OSError as error:
            raise UnavailableError(
                f"the StateManager at {path} cannot be reached ({error}): see its log",
                statemanager=path,
            ) from error
        held.callback(close_all, fds)
        for version in msgspec.convert(answer["versions"], tuple[PinnedVersion, ...]):
            regions = regions_of(version.regions, fds)
            readers.append(RemoteReader(version.manifest, regions, connection))
    return readers


def pin_for_other(
    held: ExitStack, store: Store, deployment: str, seq: int
) -> tuple[list[PinnedVersion], list[int]]:
    """What another StateManager needs to read the versions, and descriptors that it must close.

    Raises:
        StateTierFullError: one was spilled, and the host tier cannot take it back.
        CorruptStateError: one was spilled and is damaged.
    """
    pinned: list[PinnedVersion] = []
    places: dict[int, int] = {}
    # What lies on NVMe could not be verified by its reader, so it comes to memory first.
    for lease in _leases(held, store, store.lease_in_memory, deployment, seq):
        regions = tuple(
            replace(region, fd=places.setdefault(region.fd, len(places)))
            for region in lease.regions
        )
        pinned.append(PinnedVersion(manifest=lease.manifest, regions=regions))
    return pinned, [os.dup(fd) for fd in places]


def _leases(held: ExitStack, store: Store, lend: _Lend, deployment: str, seq: int) -> list[Lease]:
    found = store.find(
        lambda m: (m.deployment, m.seq, m.kind) == (deployment, seq, VersionKind.STATE)
    )
    return [
        held.enter_context(lend(version.manifest.name, version.manifest.description))
        for version in found
    ]
