"""Versions as a checkpoint reads them, wherever they lie."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

from plexrl.errors import ConnectionLostError, UnavailableError
from plexrl.statemanager.client.connection import exchange
from plexrl.statemanager.device.memory import Run
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.layout import slices_in_data
from plexrl.statemanager.protocol.channel import Channel
from plexrl.statemanager.protocol.messages import Confirm
from plexrl.statemanager.store.versions.lease import Lease
from plexrl.statemanager.store.versions.versions import Manifest
from plexrl.statemanager.transfer.copy.file_memory import version_memory
from plexrl.statemanager.transfer.copy.mapped_memory import Region, address_of


class VersionReader(Protocol):
    """One rank's version, which stays as it is while it is read."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def slices(self) -> Sequence[StateSlice]:
        """`arena_offset` counts in the data."""
        ...

    def read_data(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the data from `start` on.

        Raises:
            CorruptStateError: it is damaged.
        """
        ...

    def confirm(self) -> None:
        """Return if what was read so far is the version.

        Raises:
            UnavailableError: whoever holds the version in place is gone.
        """
        ...


class LeaseReader:
    """A version of this daemon's store."""

    def __init__(self, lease: Lease) -> None:
        """The lease stays the caller's."""
        self.manifest = lease.manifest
        self._lease = lease

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `VersionReader.slices`; made when first asked for, since pinning must not wait."""
        return slices_in_data(self.manifest)

    def read_data(self, start: int, buffer: memoryview) -> None:
        """As `VersionReader.read_data`."""
        self._lease.read_data(start, buffer)

    def confirm(self) -> None:
        """As `VersionReader.confirm`; the lease has held it."""


class RemoteReader:
    """A version in the host tier of another daemon on this machine."""

    def __init__(self, manifest: Manifest, regions: Sequence[Region], connection: Channel) -> None:
        """The descriptors, and the connection that holds the version in place, are the caller's."""
        self.manifest = manifest
        self._memory = version_memory(regions, manifest.description)
        self._connection = connection

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `VersionReader.slices`."""
        return slices_in_data(self.manifest)

    def read_data(self, start: int, buffer: memoryview) -> None:
        """As `VersionReader.read_data`."""
        self._memory.read([Run(offset=start, address=address_of(buffer), nbytes=len(buffer))])

    def confirm(self) -> None:
        """As `VersionReader.confirm`: a daemon that came back may have used the memory anew."""
        try:
            exchange(self._connection, Confirm())
        except (ConnectionLostError, OSError) as error:
            raise UnavailableError(
                f"the StateManager that has {self.manifest.description} ended while it was read "
                f"({error}): save the checkpoint again"
            ) from error
