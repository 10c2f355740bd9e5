"""The protocol by which a version is read, wherever it lies, independent of the transport."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, Protocol

from plexrl.errors import ConnectionLostError, UnavailableError
from plexrl.statemanager.bytes.mapped_files import MappedData
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.layout import slices_in_data
from plexrl.statemanager.layout.plan.balance import PullSource
from plexrl.statemanager.layout.plan.columns import Bytes, Layout
from plexrl.statemanager.layout.strided.copies import StridedCopies
from plexrl.statemanager.layout.versions import Manifest
from plexrl.statemanager.protocol.delta_policy import DeltaPolicy
from plexrl.statemanager.store.tiers.eviction.policy import TierName

Arrived = Callable[[StridedCopies, int], None]
"""Callback, called with copies that are done and the number of bytes transferred for them."""
LayoutOf = Callable[[str], Layout | None]
"""The cached layout with a digest, if any."""


class Delta(NamedTuple):
    """Permission to transfer only the changes since a version that the target holds."""

    base: str
    """Stamp of that version."""
    policy: DeltaPolicy


class VersionReader(Protocol):
    """One rank's version at one StateManager, which does not change while it is read.

    Pulls, loads under another layout, checkpoints and migrations all read through this protocol.
    Thread-safe, unless a transport says otherwise.
    """

    @property
    def address(self) -> str:
        """Address of the StateManager; empty for this daemon. Versions at one address share its
        bandwidth in a plan."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def stamp(self) -> str:
        """ETag: equal stamps mean equal bytes."""
        ...

    @property
    def layout(self) -> Layout:
        """The slices, with offsets in the version's data."""
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
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,
    ) -> None:
        """Perform `copies` from the version's data to `target`. With `delta`, a reader may transfer
        only the changes.

        Raises:
            CorruptStateError: the version is damaged, or a checksum does not match.
            UnavailableError: the StateManager is gone.
        """
        ...

    def confirm(self) -> None:
        """Return if the source has held the version until now, so that what was read is valid.
        Confirms all versions that were opened together.

        Raises:
            UnavailableError: it may not have.
        """
        ...


class StateReader(VersionReader, Protocol):
    """A version of a rank's state. Thread-safe."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def slices(self) -> Sequence[StateSlice]:
        """The version's slices; `arena_offset` is an offset in the data."""
        ...

    @property
    def tier(self) -> TierName:
        """The tier that is read: NVMe only for a spilled version of this node."""
        ...

    @property
    def mapped(self) -> MappedData | None:
        """The data in this process's memory; absent where it is not mapped."""
        ...

    def read_data(self, start: int, target: memoryview) -> None:
        """Fill `target` with the data from offset `start` on. Raises as `read`."""
        ...


class HeldState:
    """The part of a `StateReader` that follows from the manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.rank = manifest.rank
        self.stamp = manifest.stamp

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `StateReader.slices`; computed at first use, so that opening is quick."""
        return slices_in_data(self.manifest)

    @cached_property
    def layout(self) -> Layout:
        """As `VersionReader.layout`."""
        return Layout.of(self.slices)


def as_source(reader: VersionReader) -> PullSource:
    """A reader as input of a plan."""
    return PullSource(
        id=f"{reader.address}#{reader.rank}",
        link=reader.address or "here",
        layout=reader.layout,
        bytes_per_s=reader.bytes_per_s,
        request_s=reader.request_s,
    )


def offered_layout(digest: str, slices: Sequence[StateSlice] | None, layout_of: LayoutOf) -> Layout:
    """The layout that a source offers by its digest, or by its slices if it is not cached.

    Raises:
        ConnectionLostError: the source sent another layout.
    """
    layout = layout_of(digest) if slices is None else Layout.of(slices)
    if layout is None or layout.digest != digest:
        raise ConnectionLostError("the source sent a layout with another digest")
    return layout


@contextmanager
def while_there(address: str) -> Iterator[None]:
    """Report a lost connection to the StateManager at `address` as UnavailableError."""
    try:
        yield
    except (ConnectionLostError, OSError) as error:
        raise UnavailableError(
            f"the StateManager at {address} ended while a version was read ({error}): try again",
            statemanager=address,
        ) from error
