"""A controller that never pauses holds a shared group for seconds while others wait, and a burst of
usual length is not interrupted."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.dispatch.bursts import (
    BOUND_S_MIN,
    OPERATIONS_MIN,
    bound_s,
    is_after_burst,
)
from plexrl.scheduler.rules.switch_cost import interruption_s, round_trip_s
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import OperationKind
from tests.examples import examples
from tests.scheduler.dispatch.test_group_shares import QUEUED, Watched
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.jobs.asynchronous_job import Clock

MOVES = (OperationKind.LOAD, OperationKind.OFFLOAD)
LONG_S = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a job's operations and moves take, in seconds."""

    work_s: float
    load_s: float
    offload_s: float

    @property
    def round_trip_s(self) -> float:
        return self.load_s + self.offload_s


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

    def _submit(self, job: str, after: Callable[[], None]) -> str:
        name = f"{job}:{next(self._numbers)}"
        self.clock.submit(name, f"{job}/actor", "forward_backward", after)
        return name


tenths = st.integers(1, 80).map(lambda tenths: tenths / 10.0)
members = st.builds(Member, work_s=tenths, load_s=tenths, offload_s=tenths)
MODEST = Member(work_s=0.3, load_s=0.1, offload_s=0.05)
"""As measured on a busy machine, where its controller pauses for 0.2 s."""


# Without shrinking: a failure must end in time.
@settings(
    max_examples=examples(20), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(
    members,
    members,
    st.sampled_from((0.0, 0.01, 0.5, 0.9)),
    st.sampled_from((5.0, 100.0)),
    st.sampled_from(("ab", "aa")),
)
@example(MODEST, MODEST, 0.9, 5.0, "ab")
def test_nobody_waits_long_behind_a_holder_that_never_pauses(
    holder: Member, other: Member, pause_part: float, think_s: float, tenants: str
) -> None:
    """For 20 times a switch to the other one and back, or `OPERATIONS_MIN` operations, and for the
    operation and the switches around; never for longer than `burst_max_s` allows. Inside a tenant
    twice as long: until a part was cut, HRRS knows only the holder's next operations."""
    shared = Shared([holder, other], tenants=tenants)
    pause_s = pause_part * holder.round_trip_s
    shared.never_pauses("a", pause_s)
    shared.pauses("b", think_s)
    shared.run(LONG_S)
    step_s = holder.work_s + pause_s
    interruption_s = holder.round_trip_s + other.round_trip_s
    longest_s = min(300.0, max(20.0 * interruption_s, OPERATIONS_MIN * step_s, BOUND_S_MIN))
    waits_s = shared.waits_s()
    assert len(waits_s) > 2
    turns = 1 if tenants == "ab" else 2
    assert max(waits_s) <= turns * (longest_s + step_s) + interruption_s + 1e-6


@settings(
    max_examples=examples(20), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(st.lists(members, min_size=2, max_size=4))
@example([MODEST, MODEST])
def test_switches_between_jobs_that_never_pause_take_a_twentieth_at_most(
    found: list[Member],
) -> None:
    shared = Shared(found, {"burst_max_s": 1e6})
    for job in "abcd"[: len(found)]:
        shared.never_pauses(job)
    shared.run(LONG_S)
    # The first switches are of unknown length, and the last one belongs to a burst to come.
    unknown_s = 4.0 * sum(each.round_trip_s for each in found)
    assert shared.moving_s() <= LONG_S / 20.0 + unknown_s


@pytest.mark.parametrize("work_s", [5.0, 30.0])
def test_a_burst_of_usual_length_is_not_interrupted(work_s: float) -> None:
    """Bursts of ten operations and of minutes, with switches of a tenth of a second."""
    quick = Member(work_s=work_s, load_s=0.1, offload_s=0.05)
    shared = Shared([quick, quick], {"burst_max_s": 1000.0})
    for job in "ab":
        shared.pauses(job, pause_s=100.0, operations=10)
    # The first bursts are of unknown length.
    shared.run(20.0 * 10.0 * work_s)
    switches = shared.moves(OperationKind.OFFLOAD)
    bursts = len(shared.arrivals)
    shared.run(20.0 * 10.0 * work_s)
    more = len(shared.arrivals) - bursts
    assert more > 10
    assert shared.moves(OperationKind.OFFLOAD) - switches <= more + 1


def test_few_long_operations_are_a_burst_of_unknown_length_that_is_not_interrupted() -> None:
    long = Member(work_s=30.0, load_s=0.1, offload_s=0.05)
    shared = Shared([long, long])
    for job in "ab":
        shared.pauses(job, pause_s=1.0, operations=OPERATIONS_MIN)
    shared.run(2.0 * OPERATIONS_MIN * long.work_s + 5.0)
    assert shared.moves(OperationKind.OFFLOAD) == 2
    assert max(shared.waits_s()) <= OPERATIONS_MIN * long.work_s + 1.0


def test_a_burst_that_ends_by_itself_ends_the_short_bounds() -> None:
    shared = Shared([MODEST, MODEST])
    shared.never_pauses("a", 0.1)
    shared.pauses("b", 2.0)
    shared.run(100.0)
    burst = shared.deployment("a").demand.burst
    assert burst.cut_s > 0.0
    assert shared.bound_s("a") < 10.0
    assert shared.deployment("a").demand.burst_s(0) == burst.part_s < 10.0
    so_far_s = burst.cut_s
    shared.longer_s["a"] = 60.0
    shared.run(30.0)
    assert (burst.cut_s, burst.served) == (0.0, 0)
    usual_s = shared.deployment("a").demand.estimates.burst_seconds
    assert usual_s is not None
    # With all parts, so that it is known what an interruption would be.
    assert usual_s > 0.3 * so_far_s > 20.0 * 0.3


def test_a_declared_cycle_tells_the_usual_length_of_the_first_burst() -> None:
    shared = Shared([MODEST, MODEST])
    segments = (Segment(offset_s=0.0, duration_s=200.0),)
    shared.deployment("a").demand.know(DemandTrace(period_s=400.0, segments=segments))
    for job in "ab":
        shared.pauses(job, pause_s=200.0, operations=500)
    shared.run(140.0)
    assert shared.moves(OperationKind.OFFLOAD) == 0


def test_without_interruptions_a_burst_has_the_longest_bound() -> None:
    """As a scheduler of before decided; its journal is read so."""
    shared = Shared([MODEST, MODEST], {"burst_interruptions": 0.0})
    shared.never_pauses("a", 0.1)
    shared.pauses("b", 2.0)
    shared.run(700.0)
    assert max(shared.waits_s()) > 290.0
    demand = shared.deployment("a").demand
    assert demand.burst.cut_s == 0.0
    # Each part that was cut counts as a burst.
    assert demand.burst_s(0) == demand.estimates.burst_seconds
    assert demand.burst_s(0) > 100.0


def test_a_burst_without_end_yields_after_twenty_interruptions() -> None:
    cluster = FakeCluster()
    cluster.start_node()
    for job in "ab":
        cluster.job(job, tenant=job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "barrier")
    for index in range(1, 9):
        # The controller submits each operation before the one before it ends.
        cluster.submit(f"a:{index}", "a/actor", "barrier")
        cluster.pass_time(1.0)
        if index > 1:
            cluster.execute(cluster.runs[0])
        if index == 7:
            explanation = cluster.explanation_of("b:1")
            assert explanation["reason"].endswith("it yields in 0 s at the latest")
    assert [run.kind.value for run in cluster.runs] == ["offload"]


def test_a_pause_as_long_as_a_switch_there_and_back_is_one_inside_a_burst() -> None:
    shared = Shared([MODEST, MODEST], {"burst_hold_s": 0.25})
    shared.never_pauses("a")
    shared.never_pauses("b")
    shared.run(100.0)
    cluster, holder = shared.cluster.core.cluster, shared.deployment("a")
    round_s = round_trip_s(cluster.state, holder)
    assert 0.1 < round_s < 0.2
    # It counts only beyond the time that a group idles anyhow.
    assert not is_after_burst(cluster, holder, 0.25)
    assert is_after_burst(cluster, holder, 0.26)
    holder.demand.estimates.observe(OperationKind.LOAD, 0, 10.0)
    round_s = round_trip_s(cluster.state, holder)
    assert not is_after_burst(cluster, holder, round_s)
    assert is_after_burst(cluster, holder, round_s + 0.01)


def test_the_usual_gap_is_the_time_from_an_end_to_the_next_arrival() -> None:
    shared = Shared([MODEST, MODEST])
    shared.never_pauses("a", 0.125)
    # Its switches show how long a pause inside a burst may be.
    shared.pauses("b", 5.0)
    shared.run(100.0)
    assert shared.deployment("a").demand.estimates.gap_seconds == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("usual_s", "served", "cut_s", "expected_s"),
    [
        (None, OPERATIONS_MIN - 1, 0.0, 300.0),
        (None, OPERATIONS_MIN, 0.0, 6.0),
        (None, 1, 5.0, 6.0),
        (10.0, OPERATIONS_MIN, 0.0, 30.0),
        (10.0, 1, 20.0, 10.0),
        (10.0, 1, 40.0, 6.0),
        (150.0, OPERATIONS_MIN, 0.0, 300.0),
        # Longer than any cycle does: the controller pauses too seldom.
        (301.0, OPERATIONS_MIN, 0.0, 6.0),
    ],
)
def test_the_bound_follows_from_the_usual_length_and_from_what_was_cut_off(
    usual_s: float | None, served: int, cut_s: float, expected_s: float
) -> None:
    shared = Shared([MODEST, MODEST])
    for job in "ab":
        shared.never_pauses(job)
    shared.run(50.0)
    demand = shared.deployment("a").demand
    demand.estimates.burst_seconds = usual_s
    demand.burst.served, demand.burst.cut_s = served, cut_s
    assert shared.bound_s("a") == pytest.approx(expected_s)


def test_a_bound_is_a_second_at_least_and_burst_max_s_at_most() -> None:
    shared = Shared([MODEST, MODEST], {"burst_max_s": 4.0})
    shared.deployment("a").demand.burst.served = OPERATIONS_MIN
    shared.never_pauses("b")
    shared.run(1.0)
    # No move was measured yet, and such a small state is predicted to move in no time.
    assert shared.bound_s("a") == BOUND_S_MIN
    shared.never_pauses("a")
    shared.run(50.0)
    assert shared.bound_s("a") == 4.0


def test_an_interruption_costs_two_switches_and_the_end_of_the_generations_that_run() -> None:
    large = Member(work_s=0.3, load_s=2.0, offload_s=1.0)
    shared = Shared([MODEST, large, MODEST])
    for job in "abc":
        shared.never_pauses(job)
    shared.run(200.0)
    state, holder = shared.cluster.core.cluster.state, shared.deployment("a")
    moves_s = MODEST.round_trip_s + large.round_trip_s
    assert interruption_s(state, holder) == pytest.approx(moves_s)
    holder.demand.estimates.observe(OperationKind.GENERATE, 0, 5.0)
    assert interruption_s(state, holder) == pytest.approx(moves_s + 5.0)


def test_a_cut_burst_whose_rest_is_cancelled_is_over() -> None:
    shared = Shared([MODEST, MODEST])
    for job in "ab":
        shared.never_pauses(job)
    shared.run(100.0)
    cluster, demand = shared.cluster, shared.deployment("a").demand
    while not demand.burst.cut_s or demand.burst.started_at is not None:
        shared.run(0.1)
    so_far_s = demand.burst.cut_s
    for name in list(shared.deployment("a").work.queue):
        cluster.send(ev.OperationCancelled(operation=name))
    assert not shared.deployment("a").work.queue
    shared.run(60.0)
    shared.pauses("a", 60.0)
    shared.run(30.0)
    assert demand.burst.cut_s == 0.0
    # The first measurement is of the whole burst that was cut, and the second of a short one.
    assert demand.estimates.burst_seconds == pytest.approx(0.7 * so_far_s + 0.3 * MODEST.work_s)


def test_a_cut_burst_whose_workers_are_lost_counts_as_none() -> None:
    shared = Shared([MODEST, MODEST])
    for job in "ab":
        shared.never_pauses(job)
    shared.run(100.0)
    burst = shared.deployment("a").demand.burst
    assert burst.cut_s > 0.0
    shared.cluster.kill("a/actor")
    assert (burst.cut_s, burst.served) == (0.0, 0)
