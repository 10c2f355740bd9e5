"""The journal: every event the scheduler accepted, in order, on disk before it counts.

Events are appended in groups, one transaction each, so that many that arrive together share one
`fsync`. The newest snapshot and the events behind it, read into a new core, rebuild its state
(design §5, Durability).

One scheduler at a time may write: the one that holds the *lease*. Each lease has an *epoch*, one
higher than the one before, and every write checks in its own transaction that the epoch is still
its own. So two schedulers never both have events accepted, however wrong their clocks are; expiry
only decides how soon another may take over.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from plexrl.scheduler.state.events import Event

Entry = tuple[Event, float]
"""An event and the time it was accepted at, in seconds."""


class Journal(Protocol):
    """Where accepted events are kept. Every method may be called from any thread.

    Any method raises `StorageError` when the database cannot be used, `JournalUnavailableError`
    where that may pass by itself.
    """

    def acquire(self, holder: str, ttl_s: float) -> int:
        """Take the lease for `ttl_s` seconds; returns its epoch. A holder of the same name is
        taken over from at once, for it is the same scheduler started again.

        Raises:
            LeaseHeldError: another holder has it.
        """
        ...

    def renew(self) -> None:
        """Hold the lease for its full time again.

        Raises:
            LeaseLostError: another has taken it.
        """
        ...

    def release(self) -> None:
        """Let another holder take the lease at once; nothing if it is not ours any more."""
        ...

    def append(self, entries: Sequence[Entry]) -> int:
        """Make all entries durable, or none; returns the position of the last, counted from 1.

        Raises:
            JournalFullError: there is no room.
            LeaseLostError: this scheduler does not lead.
        """
        ...

    def read(self, after: int = 0) -> Iterator[tuple[int, Event, float]]:
        """(position, event, time) of every event kept behind position `after`, oldest first."""
        ...

    def write_snapshot(self, position: int, at: float, body: bytes) -> None:
        """Keep `body`, the state after the event at `position`. It may use room beyond the
        journal's bound, though not beyond the disk's. Raises as `append`."""
        ...

    def snapshot(self, before: int | None = None) -> tuple[int, float, bytes] | None:
        """The newest whole snapshot, with `before` only of lower positions; None without one.

        A snapshot that does not have its checksum is passed over.
        """
        ...

    def compact(self, kept_snapshots: int = 2) -> None:
        """Delete the events that all of the last snapshots hold, and older snapshots. With two
        kept, the loss of the newest costs nothing. Raises as `append`."""
        ...

    def set_aside(self, position: int, step: str, error: str) -> None:
        """Note that a step of the event at `position` is left out of every replay. Raises as
        `append`."""
        ...

    def steps_set_aside(self) -> dict[int, frozenset[str]]:
        """By position: the steps of events that are left out."""
        ...

    def close(self) -> None:
        """Give the journal back; waits for a write that is under way."""
        ...
