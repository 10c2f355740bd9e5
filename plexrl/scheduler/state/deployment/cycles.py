"""Training cycles: the open one, measured ones, and their busy spans."""

from dataclasses import dataclass, field
from typing import Final

WARM_UP_CYCLES: Final = 1
"""Cycles of new processes that are not measured: the first runs compile, allocate and fill
caches."""

KEPT_CYCLES: Final = 8
"""Measured cycles that are kept for the profile and the service level."""


@dataclass(slots=True, init=False)
class BusySpan:
    """Runs on the group without a pause between them.

    Times are on the cycle's clock without waiting. `__init__` is written by hand, as in
    `Operation`.
    """

    offset_s: float
    duration_s: float
    overlapped: bool
    """A rollout of the job ran when the span ended."""

    def __init__(self, offset_s: float, duration_s: float, overlapped: bool) -> None:
        self.offset_s = offset_s
        self.duration_s = duration_s
        self.overlapped = overlapped


@dataclass(slots=True, init=False)
class OpenCycle:
    """The cycle that is under way."""

    started_at: float
    waited_s: float = 0.0
    """Time waited for the group so far."""
    hidden_s: float = 0.0
    """Part of it in which rollouts of the job generated."""
    spans: list[BusySpan] = field(default_factory=list)
    ends: bool = False
    """Its last operation has run; the next submission starts another cycle."""
    has_step: bool = False
    """An optimizer step has run in it; in a rollout, a generation."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.waited_s = 0.0
        self.hidden_s = 0.0
        self.spans = []
        self.ends = False
        self.has_step = False


@dataclass(slots=True, init=False)
class Cycle:
    """A cycle that has ended. It never changes; a frozen record would take three times as long to
    make."""

    started_at: float
    length_s: float
    waited_s: float
    """Time by which waiting for the group delayed the job."""
    busy_s: float
    """Time busy on the group."""
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


@dataclass(slots=True, kw_only=True)
class Cycles:
    """The open cycle of a deployment, and its newest measured cycles."""

    open: OpenCycle | None = None
    measured: list[Cycle] = field(default_factory=list)
    """The newest cycles after the warm-up."""
    seen: int = 0
    """Cycles by the present processes."""
    ended: int = 0
    """Cycles by all processes."""
    expected: float = 0.0
    """Cycles from the first one to the end of the job, by its declared length; 0: unknown."""
    waiting_part: float | None = None
    """waiting / (waiting + running) over the last measured cycles of a deployment that has ended;
    None while `measured` holds them."""
    publishes: bool = False
    """The cycles end with a publish; those of a rollout begin with a sync."""
    steps: bool = False
    """An optimizer step was seen."""
    is_overdue: bool = False
    """The deployment's first profile was awaited in vain: others may join its group without it."""

    def begin(self, at: float) -> OpenCycle:
        """A cycle begins."""
        self.open = OpenCycle(at)
        return self.open

    def step(self) -> None:
        """An optimizer step or a generation has run in the open cycle."""
        self.steps = True
        if self.open is not None:
            self.open.has_step = True

    def count(self) -> bool:
        """A cycle has ended. True if the warm-up was over before it."""
        self.seen += 1
        self.ended += 1
        return self.seen > WARM_UP_CYCLES

    def add(self, cycle: Cycle) -> None:
        """Keep a measured cycle, and drop the oldest one if there are too many."""
        self.measured.append(cycle)
        if len(self.measured) > KEPT_CYCLES:
            del self.measured[:-KEPT_CYCLES]

    def expect(self, job_s: float, period_s: float) -> None:
        """The first demand trace is known: a job of this length, 0 if none is declared, makes so
        many cycles. Later profiles change the cycles' length, not their number."""
        if not self.expected:
            self.expected = job_s / period_s

    def await_no_profile(self) -> None:
        """The first profile was awaited in vain."""
        self.is_overdue = True

    def have_profile(self) -> None:
        """There is a profile."""
        self.is_overdue = False

    def abandon(self) -> None:
        """The open cycle measures nothing: a run in it met a full disk or memory."""
        self.open = None

    def restart(self) -> None:
        """The processes were lost or moved: the warm-up begins again."""
        self.open = None
        self.seen = 0

    def end(self, waiting_part: float | None) -> None:
        """The deployment has ended; only its waiting part is kept."""
        self.waiting_part = waiting_part
        self.measured.clear()

    def divide_by_publish(self) -> None:
        """A publish was seen, or a rollout's sync: cycles end or begin with one."""
        self.publishes = True
