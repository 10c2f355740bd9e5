"""Leases of the versions that readers ask for."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

from plexrl.errors import StorageError
from plexrl.statemanager.layout.versions import VersionKind
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.lease import VersionLease


class PublishedVersionId(Protocol):
    """Identifies a published version."""

    @property
    def source(self) -> str:
        """Deployment that published the version."""
        ...

    @property
    def seq(self) -> int: ...


def offer(lease: VersionLease, known: Collection[str]) -> dict[str, Any]:
    """Fields of the reader's answer; the slices only if the layout is not among `known`."""
    return {
        "rank": lease.rank,
        "stamp": lease.stamp,
        "nbytes": lease.manifest.nbytes,
        "layout": lease.layout.digest,
        "slices": None if lease.layout.digest in known else lease.slices,
    }


def lease_states(
    store: Store,
    leases: ExitStack,
    deployment: str,
    seq: int,
    *,
    rank: int | None = None,
    in_memory: bool = False,
    kind: VersionKind = VersionKind.STATE,
) -> list[VersionLease]:
    """Lease each rank's version of this kind in `store`, or one rank's; `leases` owns the leases.
    With `in_memory`, spilled versions are promoted first.

    Raises:
        StateTierFullError: the host tier has no space for a promotion.
        CorruptStateError: a version to promote is damaged.
    """
    lease = store.lease_in_memory if in_memory else store.lease
    return [
        leases.enter_context(lease(version.manifest.name, version.manifest.description))
        for version in store.find(
            lambda m: (
                (m.deployment, m.seq, m.kind) == (deployment, seq, kind) and rank in (None, m.rank)
            )
        )
    ]


def lease_published(
    store: Store, leases: ExitStack, wanted: PublishedVersionId
) -> Iterator[VersionLease]:
    """Lease each rank's part of the version in `store`; `leases` owns the leases.

    Raises:
        CorruptStateError: a part was spilled and is damaged.
        StateTierFullError: a part was spilled and the host tier has no space for it.
    """
    found = store.find(
        lambda m: (
            m.kind == VersionKind.PUBLISHED
            and m.deployment == wanted.source
            and m.seq == wanted.seq
        )
    )
    for version in found:
        name, what = version.manifest.name, version.manifest.description
        # A mapped NVMe file could not be verified, so the part is promoted to memory first.
        yield leases.enter_context(store.lease_in_memory(name, what))


def lease_by_stamp(
    store: Store, leases: ExitStack, shard: tuple[str, int], stamp: str
) -> VersionLease | None:
    """Lease the published version of a shard (deployment, rank) with this stamp; `leases` owns the
    lease. None if there is no such version or it cannot be promoted to memory."""
    found = store.find(
        lambda m: m.kind == VersionKind.PUBLISHED and m.shard == shard and m.stamp == stamp
    )
    for version in found:
        try:
            name, what = version.manifest.name, version.manifest.description
            leased = leases.enter_context(store.lease_in_memory(name, what))
        except StorageError:
            # The version was dropped or is damaged; callers can do without it.
            return None
        return leased if leased.stamp == stamp else None
    return None
