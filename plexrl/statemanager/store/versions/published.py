"""Published versions as their readers hold them: leased, described, open."""

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


class Wanted(Protocol):
    """Names a published version."""

    @property
    def source(self) -> str:
        """The deployment that published it."""
        ...

    @property
    def seq(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    """One rank's part of a published version, in host memory for as long as its lease lasts."""

    manifest: Manifest
    slices: tuple[StateSlice, ...]
    """Their places count from the start of the data."""
    layout: Layout
    regions: tuple[Region, ...]
    """In the order of the data; the descriptors are the lease's."""
    read_data: Callable[[int, memoryview], None]
    """As `Lease.read_data`."""

    def description(self, known: Collection[str]) -> dict[str, Any]:
        """What a reader is told of it: the slices only if it does not know the layout."""
        return {
            "rank": self.manifest.rank,
            "stamp": self.manifest.stamp,
            "nbytes": self.manifest.nbytes,
            "layout": self.layout.digest,
            "slices": None if self.layout.digest in known else self.slices,
        }


def hold_published(store: Store, leases: ExitStack, wanted: Wanted) -> Iterator[HeldShard]:
    """Every rank's part of the version that `store` has, leased into `leases`.

    Raises:
        CorruptStateError: a part was spilled and is damaged.
        StateTierFullError: a part was spilled and there is no room for it in memory.
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
        # The mapping of a file on NVMe could not be verified, so it comes to memory first.
        yield _held(leases.enter_context(store.lease_in_memory(name, what)))


def hold_stamp(
    store: Store, leases: ExitStack, shard: tuple[str, int], stamp: str
) -> HeldShard | None:
    """The published version of a shard (deployment, rank) that has `stamp`, leased into `leases`,
    if it is kept in memory or can be brought there."""
    found = store.find(
        lambda m: m.kind == VersionKind.PUBLISHED and m.shard == shard and m.stamp == stamp
    )
    for version in found:
        try:
            name, what = version.manifest.name, version.manifest.description
            held = _held(leases.enter_context(store.lease_in_memory(name, what)))
        except StorageError:
            # It was dropped meanwhile, or is damaged: whoever asked does without.
            return None
        return held if held.manifest.stamp == stamp else None
    return None


def _held(lease: Lease) -> HeldShard:
    slices = slices_in_data(lease.manifest)
    return HeldShard(
        manifest=lease.manifest,
        slices=slices,
        layout=Layout.of(slices),
        regions=lease.regions,
        read_data=lease.read_data,
    )
