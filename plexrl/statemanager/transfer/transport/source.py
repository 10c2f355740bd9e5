"""Interface between a pull and its sources, independent of the transport."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.layout.strided_copies import StridedCopies
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a published version, as a source offers it."""

    rank: int
    stamp: str
    """ETag: equal stamps mean equal bytes."""
    layout: Layout
    """The slices, with offsets in the version's data."""
    nbytes: int
    """Size of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopies:
    """Copies to read from one shard."""

    shard: int
    """Index into `OpenSource.shards`."""
    copies: StridedCopies
    """Copies from the shard's data to the target's memory."""
    base: str | None = None
    """Stamp of the version of this shard that the target holds, as base of a delta; absent:
    none."""


Arrived = Callable[[StridedCopies, int], None]
"""Callback, called with copies that are done and the number of bytes transferred for them."""


class OpenSource(Protocol):
    """The shards of one version at one StateManager, which holds them until `close`.

    One thread at a time. Every method raises `ConnectionLostError` or `OSError` if the source is
    gone.
    """

    @property
    def address(self) -> str:
        """Address of the source. Shards at one address share its bandwidth in a plan."""
        ...

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The source's shards of the version."""
        ...

    @property
    def bytes_per_s(self) -> float:
        """Approximate bandwidth; plans balance by it."""
        ...

    @property
    def request_s(self) -> float:
        """Approximate latency of a piece in addition to its bytes."""
        ...

    @property
    def arrives_whole(self) -> bool:
        """Whether bytes that were read are valid if the source is lost before `confirm`."""
        ...

    def read(
        self,
        parts: tuple[ShardCopies, ...],
        target: Bytes,
        arrived: Arrived,
        delta: DeltaPolicy | None = None,
    ) -> None:
        """Copy all parts into `target`; with `delta`, only the changes of parts with a base.

        Raises:
            CorruptStateError: a checksum does not match.
        """
        ...

    def confirm(self) -> None:
        """Return if the source has held the version until now."""
        ...

    def close(self) -> None:
        """Release the version."""
        ...


class Transport(Protocol):
    """Opens sources of one kind of address."""

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> OpenSource:
        """The shards of a version at `address`, possibly none.

        `known` are digests of the layouts that the client has cached.
        """
        ...


LayoutOf = Callable[[str], Layout | None]
"""The cached layout with a digest, if any."""
