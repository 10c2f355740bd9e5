"""Jobs on one group in virtual time, with what their operations and moves take."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, cycle

from plexrl.ids import DeploymentId
from plexrl.scheduler.dispatch.bursts import bound_s
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind
from tests.scheduler.dispatch.test_group_shares import QUEUED, Watched
from tests.scheduler.jobs.asynchronous_job import Clock

MOVES = (OperationKind.LOAD, OperationKind.OFFLOAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a job's operations and moves take, in seconds."""

    work_s: float
    load_s: float
    offload_s: float

    pass_s: float = 0.1
    """Of an operation of another kind."""

    @property
    def round_trip_s(self) -> float:
        return self.load_s + self.offload_s


LONG, SHORT = "forward_backward", "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What a controller submits, over and over: bursts of operations, each with the pause after
    it. It awaits each result for `gap_s` before the next operation."""

    bursts: tuple[tuple[tuple[str, ...], float], ...]
    gap_s: float
    declared_s: float | None
    """Length of the segment that the user declares, true or not."""

    @property
    def pauses(self) -> bool:
        return any(pause_s > self.gap_s for _, pause_s in self.bursts)


@dataclass(slots=True)
class Shared:
    """Jobs `a`, `b`, … on one group."""

    members: list[Member]
    changes: dict[str, object] = field(default_factory=dict)
    tenants: str = "abcd"
    cluster: Watched = field(init=False)
    clock: Clock = field(init=False)
    arrivals: dict[str, float] = field(default_factory=dict)
    """When the first operation of each burst of a job that pauses was submitted."""
    longer_s: dict[str, float] = field(default_factory=dict)
    """How long a job that never pauses pauses for once."""
    _numbers: "count[int]" = field(default_factory=count)

    def __post_init__(self) -> None:
        fields = {"load_max": 100.0, "starvation_bound_s": 1e9, **self.changes}
        self.cluster = Watched(**fields)
        self.cluster.start_node(2)
        self.clock = Clock(self.cluster)
        for job, tenant, member in zip("abcd", self.tenants, self.members, strict=False):
            self.cluster.job(job, tenant=tenant)
            self.cluster.deploy(f"{job}/actor")
            self.clock.takes(
                f"{job}/actor",
                forward_backward=member.work_s,
                forward=member.pass_s,
                load=member.load_s,
                offload=member.offload_s,
            )

    def never_pauses(self, job: str, pause_s: float = 0.0) -> None:
        """Operations are always queued, or each arrives so long after the end of the last one."""

        def again() -> None:
            self._submit(job, after)

        def after() -> None:
            self.clock.later(self.longer_s.pop(job, pause_s), again)

        for _ in range(1 if pause_s else QUEUED):
            again()

    def pauses(self, job: str, pause_s: float, operations: int = 1) -> None:
        """It computes for some operations, and then pauses."""

        def burst(left: int) -> None:
            def after() -> None:
                if left > 1:
                    burst(left - 1)
                else:
                    self.clock.later(pause_s, lambda: burst(operations))

            # Submitted when the last one has ended, so that no queue tells how long the burst is.
            name = self._submit(job, after)
            if left == operations:
                self.arrivals[name] = self.cluster.now

        burst(operations)

    def streams(self, job: str, stream: Stream) -> None:
        """Its controller submits these operations, without end."""
        if stream.declared_s is not None:
            segments = (Segment(offset_s=0.0, duration_s=stream.declared_s),)
            trace = DemandTrace(period_s=2.0 * stream.declared_s, segments=segments)
            self.deployment(job).demand.know(trace)
        steps = [
            (kind, at == 0, pause_s if at + 1 == len(kinds) else stream.gap_s)
            for kinds, pause_s in stream.bursts
            for at, kind in enumerate(kinds)
        ]
        turns = cycle(steps)

        def submit() -> None:
            kind, begins, then_s = next(turns)
            name = self._submit(job, lambda: self.clock.later(then_s, submit), kind)
            if begins:
                self.arrivals[name] = self.cluster.now

        submit()

    def run(self, seconds: float) -> None:
        """Let everything happen in so many seconds."""
        self.clock.run_until(self.cluster.now + seconds)

    def waits_s(self) -> list[float]:
        """How long each burst of a job that pauses waited for its first operation to start."""
        began = {name: span.begin for (name, _), span in self.cluster.spans.items()}
        return [began.get(name, self.cluster.now) - at for name, at in self.arrivals.items()]

    def moves(self, kind: OperationKind) -> int:
        """Number of moves of a kind."""
        return sum(span.kind == kind for span in self.cluster.spans.values())

    def moving_s(self) -> float:
        """Seconds in which states were moved."""
        spans = [span for span in self.cluster.spans.values() if span.kind in MOVES]
        return sum(min(span.end, self.cluster.now) - span.begin for span in spans)

    def bound_s(self, job: str) -> float:
        """For how long a burst of the job may hold the group."""
        return bound_s(self.cluster.core.cluster, self.deployment(job))

    def deployment(self, job: str) -> Deployment:
        return self.cluster.core.cluster.state.deployments[DeploymentId(f"{job}/actor")]

    def submit(self, job: str, kind: str) -> None:
        """One operation, after which its controller does nothing."""
        self._submit(job, lambda: None, kind)

    def _submit(self, job: str, after: Callable[[], None], kind: str = LONG) -> str:
        name = f"{job}:{next(self._numbers)}"
        self.clock.submit(name, f"{job}/actor", kind, after)
        return name
