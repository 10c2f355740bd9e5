"""What a pull asks of a source, whatever way leads to it."""

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
    """Unique to its bytes."""
    layout: Layout
    """Places count from the start of the version's data."""
    nbytes: int
    """Of the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCopies:
    """What to read of one shard."""

    shard: int
    """Index into `OpenSource.shards`."""
    copies: StridedCopies
    """From places in the shard's data to places in the target's memory."""
    base: str | None = None
    """Stamp of the same shard's version that the target's memory holds now, so that what has not
    changed since need not be sent; absent: it holds none."""


Arrived = Callable[[StridedCopies, int], None]
"""Told of copies that are in place, and of the bytes that it took."""


class OpenSource(Protocol):
    """Shards of one version at one StateManager, held in place until `close`.

    One thread reads at a time. Every method raises `ConnectionLostError` or `OSError` where the
    source is gone.
    """

    @property
    def address(self) -> str:
        """Where it is, for messages and as the name of its link."""
        ...

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Those that the source has."""
        ...

    @property
    def bytes_per_s(self) -> float:
        """About what its link carries; plans balance by it."""
        ...

    @property
    def request_s(self) -> float:
        """About what one piece costs on top of its bytes."""
        ...

    @property
    def arrives_whole(self) -> bool:
        """Whether bytes that were read stay valid when the source goes before `confirm`."""
        ...

    def read(
        self,
        parts: tuple[ShardCopies, ...],
        target: Bytes,
        arrived: Arrived,
        delta: DeltaPolicy | None = None,
    ) -> None:
        """Bring all parts to their places in `target`; with `delta`, what has changed of parts
        that have a base.

        Raises:
            CorruptStateError: bytes were changed on the way.
        """
        ...

    def confirm(self) -> None:
        """Return if the source held the version all the time until now."""
        ...

    def close(self) -> None:
        """Let go of the version."""
        ...


class Transport(Protocol):
    """Opens sources of one kind of address."""

    def open(self, address: str, deployment: str, seq: int, known: Collection[str]) -> OpenSource:
        """The shards of a version at `address`; none if it has none of that version.

        `known` are digests of layouts that need not be described again.
        """
        ...


LayoutOf = Callable[[str], Layout | None]
"""The layout of a digest, if it is known."""
