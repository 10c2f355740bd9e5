"""Versions held in place for a checkpoint: this daemon's, and those of others on the machine.

Held are the bytes, not the name: a later save replaces or drops the version meanwhile, and what it
occupies counts in its tier until the checkpoint is written.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec

from plexrl.errors import UnavailableError
from plexrl.statemanager.checkpoint.requests import PinnedVersion, PinVersions
from plexrl.statemanager.checkpoint.source import FileReader, VersionReader
from plexrl.statemanager.connection import connect, exchange
from plexrl.statemanager.protocol import close_all
from plexrl.statemanager.store import Store
from plexrl.statemanager.versions import Manifest, VersionKind

TIMEOUT_S = 10.0
"""Of another StateManager's answer."""


def pin_here(held: ExitStack, store: Store, deployment: str, seq: int) -> list[VersionReader]:
    """Readers of the versions that `store` has, for as long as `held` is open."""
    readers: list[VersionReader] = []
    for manifest, fd, data_offset in lease_versions(held, store, deployment, seq):
        reader = FileReader(manifest, fd, data_offset)
        held.callback(reader.close)
        readers.append(reader)
    return readers


def pin_elsewhere(
    held: ExitStack, sources: Sequence[str], deployment: str, seq: int
) -> list[VersionReader]:
    """Readers of the versions that the StateManagers at `sources` have.

    Raises:
        UnavailableError: one cannot be reached.
    """
    readers: list[VersionReader] = []
    request = PinVersions(deployment=deployment, seq=seq)
    for path in dict.fromkeys(sources):
        try:
            connection = held.enter_context(connect(path, TIMEOUT_S))
            answer, fds = exchange(connection, request)
        except OSError as error:
            raise UnavailableError(
                f"the StateManager at {path} cannot be reached ({error}): see its log",
                statemanager=path,
            ) from error
        try:
            versions = msgspec.convert(answer["versions"], tuple[PinnedVersion, ...])
            for version, fd in zip(versions, fds, strict=True):
                reader = FileReader(version.manifest, fd, version.data_offset)
                held.callback(reader.close)
                readers.append(reader)
        finally:
            close_all(fds)
    return readers


def lease_versions(
    held: ExitStack, store: Store, deployment: str, seq: int
) -> list[tuple[Manifest, int, int]]:
    """Manifest, descriptor and place of the data of every version of that seq in the store."""
    found = store.find(
        lambda m: (m.deployment, m.seq, m.kind) == (deployment, seq, VersionKind.STATE)
    )
    leased = []
    for version in found:
        lease = held.enter_context(store.lease(version.manifest.name, version.manifest.description))
        leased.append((lease.file.manifest, lease.fd, lease.file.data_offset))
    return leased


def pin_for_other(
    held: ExitStack, store: Store, deployment: str, seq: int
) -> tuple[list[PinnedVersion], list[int]]:
    """What another StateManager needs to read the versions, and descriptors that it must close."""
    pinned: list[PinnedVersion] = []
    opened: list[int] = []
    try:
        for manifest, fd, data_offset in lease_versions(held, store, deployment, seq):
            pinned.append(PinnedVersion(manifest=manifest, data_offset=data_offset))
            opened.append(os.dup(fd))
    except BaseException:
        close_all(opened)
        raise
    return pinned, opened
