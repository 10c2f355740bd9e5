"""The journal's interface: a durable log of all events that the scheduler accepted, in order.

Events are appended in groups, one transaction each, so that events that arrive together share one
`fsync`. A core is restored from the newest snapshot and the events after it (design §5,
Durability).

Only the scheduler that holds the *lease* may write. Each lease has an *epoch*, one higher than the
previous one, and every write checks in its transaction that the epoch is unchanged. So two
schedulers never both get events accepted, however wrong their clocks are. The expiry only decides
how soon another scheduler may take over.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from plexrl.scheduler.state.messages.events import Event

Row = tuple[int, float, str]
"""(position, time, event as JSON) of a stored event."""

Entry = tuple[Event, float]
"""(event, time of acceptance in seconds)."""


class Journal(Protocol):
    """Stores accepted events. Every method may be called from any thread.

    Every method raises `StorageError` if the database cannot be used, and `JournalUnavailableError`
    if that may be temporary.
    """

    def acquire(self, holder: str, ttl_s: float) -> int:
        """Take the lease for `ttl_s` seconds; returns its epoch. A lease under the same name is
        taken at once, because its holder is an earlier process of the same scheduler.

        Raises:
            LeaseHeldError: another scheduler holds the lease.
        """
        ...

    def renew(self) -> None:
        """Extend the lease to its full time.

        Raises:
            LeaseLostError: another scheduler has taken it.
        """
        ...

    def release(self) -> None:
        """Let another scheduler take the lease at once; no effect if it is no longer ours."""
        ...

    def append(self, entries: Sequence[Entry]) -> int:
        """Append all entries durably, or none; returns the position of the last, counted from 1.

        Raises:
            JournalFullError: the journal is full.
            LeaseLostError: this scheduler does not lead.
        """
        ...

    def read(self, after: int = 0) -> Iterator[tuple[int, Event, float]]:
        """(position, event, time) of every stored event after position `after`, oldest first."""
        ...

    def rows(self, after: int, count: int) -> list[Row]:
        """At most `count` stored events after position `after`, oldest first, as they are
        stored."""
        ...

    def write_snapshot(self, position: int, at: float, body: bytes) -> None:
        """Store `body`, the state after the event at `position`. It may exceed the journal's size
        limit. Raises as `append`."""
        ...

    def snapshot(self, before: int | None = None) -> tuple[int, float, bytes] | None:
        """The newest intact snapshot (with `before`: at a lower position); None if there is none.

        Snapshots with a wrong checksum are ignored.
        """
        ...

    def compact(self, kept_snapshots: int = 2, upto: int | None = None) -> None:
        """Keep the newest `kept_snapshots` snapshots, and delete older ones and the events before
        all of them. With two, a damaged newest snapshot loses nothing. `upto`: no event after it
        is deleted; None: any may be. Raises as `append`."""
        ...

    def skip_step(self, position: int, step: str, error: str) -> None:
        """Record that every replay skips a step of the event at `position`. Raises as `append`."""
        ...

    def skipped_steps(self) -> dict[int, frozenset[str]]:
        """The skipped steps of events, by position."""
        ...

    def close(self) -> None:
        """Close the journal; waits for a running write."""
        ...
