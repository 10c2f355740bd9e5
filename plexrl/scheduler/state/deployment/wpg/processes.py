"""The worker processes of a WPG."""

from collections.abc import Collection
from dataclasses import dataclass, field

from plexrl.ids import OperationId


@dataclass(slots=True, kw_only=True)
class Processes:
    """The present incarnation of a WPG's processes; each launch makes a new one."""

    incarnation: int = 0
    """0: there was none."""
    addresses: dict[int, str] = field(default_factory=dict)
    """Addresses of the workers that are ready, by rank."""
    endpoints: tuple[str, ...] = ()
    """All addresses in the order of ranks, once the WPG is ready."""
    ready_at: float = 0.0
    """When all processes were last ready."""
    failures: int = 0
    """Launches in a row that were lost at the same operation."""
    suspects: tuple[OperationId, ...] = ()
    """Operations that ran each time; empty: none ran."""
    losses: int = 0
    """Lost launches since an operation that was no repetition last completed."""
    starts: int = 0
    """Launches, for whatever reason, since an operation that was no repetition last completed."""
    ended_because: str = ""
    """Why the last incarnation was ended."""
    overruns: int = 0
    """How many of these followed an end of the workers because a run had missed its bound."""
    launch_at: float | None = None
    """When the processes are started: their last start found no free disk space, or there was no
    port at which they could meet. None: they are being started, or run."""
    launched_at: float = 0.0
    """When their start was last ordered."""
    port: int = 0
    """Port on the node of rank 0 at which the ranks of the present incarnation meet; 0: at a file.
    """

    def begin_launch(self, former: int, port: int) -> None:
        """Processes are started, which meet at `port`; the last incarnation before them was
        `former`."""
        self.incarnation = former + 1
        self.starts += 1
        self.port = port
        self.launch_at = None
        self.addresses.clear()

    def order_launch(self, now: float) -> None:
        """The agents are told to start the processes, or told again."""
        self.launched_at = now

    def delay_launch(self, until: float) -> None:
        """Processes are started no earlier than then."""
        self.launch_at = until
        self.port = 0

    def cancel_launch(self) -> None:
        """No launch waits."""
        self.launch_at = None

    def add(self, rank: int, address: str) -> int:
        """A worker is ready.

        Returns:
            How many are ready.
        """
        self.addresses[rank] = address
        return len(self.addresses)

    def connect(self) -> None:
        """All workers are ready."""
        self.endpoints = tuple(address for _, address in sorted(self.addresses.items()))

    def note_ready(self, now: float) -> None:
        """The WPG is ready with them."""
        self.ready_at = now

    def lose(self, rank: int) -> None:
        """A worker is gone."""
        self.addresses.pop(rank, None)

    def lose_all(self) -> None:
        """All workers are gone."""
        self.addresses.clear()
        self.port = 0

    def end(self, reason: str) -> None:
        """The present incarnation is ended."""
        self.ended_because = reason

    def outdate(self) -> None:
        """Reports of the present incarnation no longer count."""
        self.incarnation += 1

    def fail(self, running: Collection[OperationId]) -> None:
        """A launch failed, or the processes were lost while these operations ran. Only losses at
        the same operation speak against the WPG: faults of machines hit operations at random."""
        common = tuple(sorted(set(self.suspects).intersection(running)))
        if self.losses and (common or not (running or self.suspects)):
            self.failures += 1
            self.suspects = common
        else:
            self.failures = 1
            self.suspects = tuple(sorted(running))
        self.losses += 1

    def overrun(self) -> None:
        """A run has missed its bound, and the processes are ended."""
        self.overruns += 1

    def succeed(self) -> None:
        """An operation that was no repetition completed."""
        self.overruns = 0
        self.failures = 0
        self.suspects = ()
        self.losses = 0
        self.starts = 0
