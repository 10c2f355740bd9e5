"""A training cycle as the profiler sees it, under way and over."""

from dataclasses import dataclass, field


@dataclass(slots=True, init=False)
class BusySpan:
    """Runs on the group without a pause between them, on the clock of a cycle from which waiting is
    taken out. Made in every cycle, as the next two are: see `Operation`."""

    offset_s: float
    duration_s: float
    overlapped: bool
    """A rollout of the job was under way when it ended."""

    def __init__(self, offset_s: float, duration_s: float, overlapped: bool) -> None:
        self.offset_s = offset_s
        self.duration_s = duration_s
        self.overlapped = overlapped


@dataclass(slots=True, init=False)
class OpenCycle:
    """The cycle at hand, as the profiler sees it."""

    started_at: float
    waited_s: float = 0.0
    """For the group, so far."""
    spans: list[BusySpan] = field(default_factory=list)
    ends: bool = False
    """Its last operation has run; the next submission starts another cycle."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.waited_s = 0.0
        self.spans = []
        self.ends = False


@dataclass(slots=True, init=False)
class Cycle:
    """A cycle that is over, and never changes: were it frozen, it would take three times as long to
    make."""

    started_at: float
    length_s: float
    waited_s: float
    busy_s: float
    """On the group."""
    spans: tuple[BusySpan, ...]

    def __init__(
        self,
        started_at: float,
        length_s: float,
        waited_s: float,
        busy_s: float,
        spans: tuple[BusySpan, ...],
    ) -> None:
        self.started_at = started_at
        self.length_s = length_s
        self.waited_s = waited_s
        self.busy_s = busy_s
        self.spans = spans
