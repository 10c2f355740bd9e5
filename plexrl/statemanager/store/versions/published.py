"""Published versions, leased for their readers."""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from plexrl.errors import StorageError
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.layout import slices_in_data
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.lease import Lease
from plexrl.statemanager.store.versions.versions import Manifest, VersionKind
from plexrl.statemanager.transfer.copy.mapped_memory import Region


class PublishedVersionId(Protocol):
    """Identifies a published version."""

    @property
    def source(self) -> str:
        """Deployment that published the version."""
        ...

    @property
    def seq(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedShard:
    """One rank's part of a published version, in host memory while the lease lasts."""

    manifest: Manifest
    slices: tuple[StateSlice, ...]
    """Slices with offsets from the start of the data."""
    layout: Layout
    regions: tuple[Region, ...]
    """In the order of the data; the descriptors belong to the lease."""
    read_data: Callable[[int, memoryview], None]
    """As `Lease.read_data`."""

    def description(self, known: Collection[str]) -> dict[str, Any]:
        """Fields of the reader's answer; the slices only if the layout is not among `known`."""
        return {
            "rank": self.manifest.rank,
            "stamp": self.manifest.stamp,
            "nbytes": self.manifest.nbytes,
            "layout": self.layout.digest,
            "slices": None if self.layout.digest in known else self.slices,
        }


def lease_published(
    store: Store, leases: ExitStack, wanted: PublishedVersionId
) -> Iterator[LeasedShard]:
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
        yield _leased(leases.enter_context(store.lease_in_memory(name, what)))


def lease_by_stamp(
    store: Store, leases: ExitStack, shard: tuple[str, int], stamp: str
) -> LeasedShard | None:
    """Lease the published version of a shard (deployment, rank) with this stamp; `leases` owns the
    lease. None if there is no such version or it cannot be promoted to memory."""
    found = store.find(
        lambda m: m.kind == VersionKind.PUBLISHED and m.shard == shard and m.stamp == stamp
    )
    for version in found:
        try:
            name, what = version.manifest.name, version.manifest.description
            leased = _leased(leases.enter_context(store.lease_in_memory(name, what)))
        except StorageError:
            # The version was dropped or is damaged; callers can do without it.
            return None
        return leased if leased.manifest.stamp == stamp else None
    return None


def _leased(lease: Lease) -> LeasedShard:
    slices = slices_in_data(lease.manifest)
    return LeasedShard(
        manifest=lease.manifest,
        slices=slices,
        layout=Layout.of(slices),
        regions=lease.regions,
        read_data=lease.read_data,
    )
