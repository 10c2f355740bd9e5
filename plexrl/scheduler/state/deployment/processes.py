"""The worker processes of a WPG."""

from dataclasses import dataclass, field


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
    """Launches since an operation last completed."""
    launch_at: float | None = None
    """When the processes are started: their last start found no free disk space, or there was no
    port at which they could meet. None: they are being started, or run."""
    port: int = 0
    """Port on the node of rank 0 at which the ranks of the present incarnation meet; 0: at a file.
    """

    def begin_launch(self, former: int, port: int) -> None:
        """Processes are started, which meet at `port`; the last incarnation before them was
        `former`."""
        self.incarnation = former + 1
        self.port = port
        self.launch_at = None
        self.addresses.clear()

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

    def lose(self, rank: int) -> None:
        """A worker is gone."""
        self.addresses.pop(rank, None)

    def lose_all(self) -> None:
        """All workers are gone."""
        self.addresses.clear()
        self.port = 0

    def outdate(self) -> None:
        """Reports of the present incarnation no longer count."""
        self.incarnation += 1

    def fail(self) -> None:
        """A launch or a run failed."""
        self.failures += 1

    def succeed(self) -> None:
        """An operation completed."""
        self.failures = 0
