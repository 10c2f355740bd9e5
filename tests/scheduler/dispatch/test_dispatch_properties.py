"""Members take turns on a group: nobody starves, guests keep out of others' time, order is kept."""

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.scheduler.rules.hrrs import Candidate
from plexrl.scheduler.rules.ordering import ORDERINGS, first, make_ordering
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire import messages as cmd
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

MOVE_S = 2.0
LONGEST_S = 20.0
STARVATION_S = 60.0
BURST_S = 30.0
JOBS = ("a", "b", "c")


@dataclass(slots=True)
class Clocked:
    """One group whose runs take their time, while operations arrive."""

    cluster: FakeCluster
    length_s: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, list[str]] = field(default_factory=lambda: {job: [] for job in JOBS})
    since: dict[str, float] = field(default_factory=dict)
    """Since when a job wants the group, or when it was last served."""
    longest_wait_s: float = 0.0
    order: list[str] = field(default_factory=list)
    _current: cmd.Run | None = None
    _ends_at: float = 0.0

    def submit(self, operation: str, length_s: float) -> None:
        job = operation.split(":")[0]
        self.length_s[operation] = length_s
        if not self.waiting[job]:
            self.since[job] = self.cluster.now
        self.waiting[job].append(operation)
        self.cluster.submit(operation, f"{job}/actor", "forward_backward")
        self._look()

    def until(self, at: float) -> None:
        """Let time pass, with the ends of runs and the timers in between."""
        cluster = self.cluster
        while True:
            self._look()
            timer_at = at if cluster.timer_at is None else cluster.timer_at
            ends_at = at if self._current is None else self._ends_at
            soonest = max(cluster.now, min(at, timer_at, ends_at))
            cluster.pass_time(soonest - cluster.now)
            self._look()
            if self._current is not None and cluster.now >= self._ends_at:
                self._current, run = None, self._current
                cluster.execute(run)
            elif cluster.now >= at:
                return

    def finish(self) -> None:
        """Go on until nothing waits."""
        for _ in range(2000):
            if not self.cluster.runs and not any(self.waiting.values()):
                return
            self.until(self.cluster.now + 10.0)
        raise AssertionError(f"these never run: {self.waiting}")

    def _look(self) -> None:
        runs = self.cluster.runs
        assert len(runs) <= 1, "two hold the group"
        if runs and runs[0] is not self._current:
            self._current = runs[0]
            name = self._current.operation
            self._ends_at = self.cluster.now + self.length_s.get(name, MOVE_S)
            if name in self.length_s:
                job = name.split(":")[0]
                waited_s = self.cluster.now - self.since[job]
                self.longest_wait_s = max(self.longest_wait_s, waited_s)
                self.since[job] = self.cluster.now
                assert self.waiting[job].pop(0) == name, "a job's order is not kept"
                self.order.append(name)


def clocked(**changes: object) -> Clocked:
    fields: dict[str, object] = {
        "starvation_bound_s": STARVATION_S,
        "burst_max_s": BURST_S,
        "snapshot_operations": 10_000,
    }
    cluster = FakeCluster(**{**fields, **changes})
    cluster.start_node()
    return Clocked(cluster)


arrivals = st.lists(
    st.tuples(
        st.sampled_from((0.0, 1.0, 15.0, 60.0)),
        st.sampled_from(JOBS),
        st.integers(1, 12),
        st.floats(0.1, LONGEST_S),
    ),
    max_size=15,
)


@settings(
    max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(
    st.sampled_from(sorted(ORDERINGS)),
    st.tuples(*(st.sampled_from((-50, 0, 50)) for _ in JOBS)),
    arrivals,
)
def test_no_member_waits_beyond_the_bound_and_one_turn_of_everybody(
    ordering: str, priorities: tuple[int, ...], bursts: list[tuple[float, str, int, float]]
) -> None:
    clock = clocked(ordering=ordering)
    for job, priority in zip(JOBS, priorities, strict=True):
        clock.cluster.job(job, priority=priority)
        clock.cluster.deploy(f"{job}/actor")
    clock.cluster.settle()
    count = 0
    for gap_s, job, operations, length_s in bursts:
        for _ in range(operations):
            count += 1
            clock.submit(f"{job}:{count}", length_s)
        clock.until(clock.cluster.now + gap_s)
    clock.finish()
    turn_s = BURST_S + LONGEST_S + 2 * MOVE_S
    assert clock.longest_wait_s <= STARVATION_S + len(JOBS) * turn_s


@pytest.mark.parametrize("ordering", sorted(ORDERINGS))
def test_a_deep_queue_of_a_high_class_does_not_starve_a_low_one(ordering: str) -> None:
    clock = clocked(ordering=ordering)
    for job, priority in (("a", 100), ("b", 0), ("c", 100)):
        clock.cluster.job(job, priority=priority)
        clock.cluster.deploy(f"{job}/actor")
    clock.cluster.settle()
    clock.submit("b:1", 5.0)
    for index in range(60):
        clock.submit(f"a:{index}", 10.0)
        clock.submit(f"c:{index}", 10.0)
    clock.until(clock.cluster.now + 20.0)
    clock.submit("b:2", 5.0)
    clock.finish()
    turn_s = BURST_S + LONGEST_S + 2 * MOVE_S
    assert clock.longest_wait_s <= STARVATION_S + len(JOBS) * turn_s


def test_of_those_who_starve_the_one_that_waited_longest_goes_first() -> None:
    low = Candidate(name="low", arrived_at=0.0, service_s=9.0, setup_s=1.0)
    high = Candidate(name="high", arrived_at=50.0, service_s=9.0, setup_s=1.0, priority=9)
    served = Candidate(name="s", arrived_at=0.0, service_s=9.0, setup_s=1.0, served_at=95.0)
    for name in ORDERINGS:
        rule = make_ordering(name)
        assert first(rule, [low, high, served], 70.0, 60.0) is low, name
        assert first(rule, [low, high, served], 120.0, 60.0) is low, name
        assert first(rule, [low, high], 59.0, 60.0) is high, name


def test_a_wait_starves_at_the_bound_counted_from_the_last_service() -> None:
    low = Candidate(name="low", arrived_at=0.0, service_s=9.0, setup_s=1.0)
    high = Candidate(name="high", arrived_at=59.0, service_s=9.0, setup_s=1.0, priority=9)
    served = Candidate(name="a", arrived_at=0.0, service_s=9.0, setup_s=1.0, served_at=10.0)
    for name in ORDERINGS:
        rule = make_ordering(name)
        assert first(rule, [low, high], 60.0, 60.0) is low, name
        assert first(rule, [low, served], 60.0, 60.0) is low, name
        assert first(rule, [served, high], 69.0, 60.0) is high, name
        assert first(rule, [served, high], 70.0, 60.0) is served, name


CRITICAL = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=30.0),))
LONG = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=90.0),))


def with_a_guest(compute_s: float = 0.1, **changes: object) -> Clocked:
    """`a` has time of its own: 30 s each 100 s; `b`, planned for 90 s, overlaps it. Each of their
    moves is reported to take `compute_s`."""
    fields: dict[str, object] = {
        "policy": "spread+backfill",
        "overlap_max": 1.0,
        "load_max": 2.0,
        "anticipation": False,
        "starvation_bound_s": 1000.0,
        "burst_max_s": 1000.0,
    }
    clock = clocked(**{**fields, **changes})
    cluster = clock.cluster
    cluster.compute_s = compute_s
    cluster.core = type(cluster.core)(cluster.config)
    cluster.nodes.clear()
    cluster.join_node(2)
    cluster.join_router()
    for job, trace in (("a", CRITICAL), ("b", LONG)):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", trace=trace)
    cluster.settle()
    for index in range(4):
        clock.submit(f"a:{index}", 30.0)
        clock.until(cluster.now + 35.0)
        if index == 1:
            clock.submit("b:0", 20.0)
        clock.until(cluster.now + 65.0)
    return clock


def test_a_guest_keeps_out_of_a_critical_segment_and_starts_behind_it() -> None:
    clock = with_a_guest()
    clock.submit("a:9", 30.0)
    clock.until(clock.cluster.now + 36.0)
    clock.submit("b:1", 20.0)
    clock.until(clock.cluster.now + 20.0)
    assert clock.order[-1] == "b:1", "there is room for it before the next segment"
    clock.submit("a:10", 30.0)
    clock.until(clock.cluster.now + 40.0)
    clock.until(clock.cluster.now + 50.0)
    clock.submit("b:2", 20.0)
    clock.until(clock.cluster.now + 1.0)
    assert clock.order[-1] == "a:10", "the critical segment is about to come"
    explanation = clock.cluster.explanation_of("b:2")
    assert explanation["eta_s"] is not None
    assert explanation["eta_s"] > 0
    clock.submit("a:11", 30.0)
    clock.finish()
    assert clock.order[-2:] == ["a:11", "b:2"]


@pytest.mark.parametrize(("pause_s", "last"), [(73.0, "b:1"), (75.0, "a:9")])
def test_a_guest_starts_only_if_the_switch_back_fits_too(pause_s: float, last: str) -> None:
    """Of the 100 s of a cycle `b` needs 20 s, 2 · 2 s for the switch and 2 · 2 s back."""
    clock = with_a_guest(compute_s=MOVE_S)
    clock.submit("a:9", 30.0)
    clock.until(clock.cluster.now + pause_s)
    clock.submit("b:1", 20.0)
    clock.until(clock.cluster.now + 6.0)
    assert clock.order[-1] == last


def test_a_guest_that_has_waited_as_long_as_its_burst_starts() -> None:
    clock = with_a_guest()
    clock.submit("a:9", 30.0)
    clock.until(clock.cluster.now + 90.0)
    at = clock.cluster.now
    clock.submit("b:1", 20.0)
    clock.until(at + 15.0)
    assert clock.order[-1] == "a:9"
    clock.until(at + 40.0)
    assert clock.order[-1] == "b:1"


def test_a_guest_that_starves_starts_whatever_its_ratio() -> None:
    clock = with_a_guest(starvation_ratio=1000.0, starvation_bound_s=12.0)
    clock.submit("a:9", 30.0)
    clock.until(clock.cluster.now + 90.0)
    clock.submit("b:1", 20.0)
    clock.until(clock.cluster.now + 20.0)
    assert clock.order[-1] == "b:1"


@pytest.mark.parametrize(("host_bytes", "hints"), [(1500, ["a/actor", "b/actor"]), (1 << 30, [])])
def test_states_are_fetched_ahead_only_where_host_memory_is_too_small(
    host_bytes: int, hints: list[str]
) -> None:
    cluster = FakeCluster()
    cluster.nodes["n"] = ev.NodeJoined(
        node="n",
        gpus=2,
        gpu_memory_bytes=1 << 30,
        host_memory_bytes=host_bytes,
        statemanager="sm:n",
        nvme_bytes=1 << 30,
    )
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    for index in range(3):
        for job in ("a", "b"):
            cluster.submit(f"{job}:{index}", f"{job}/actor", "forward_backward")
        cluster.settle()
    assert [hint.deployment for hint in cluster.prefetches] == hints, "anew in every cycle"
    assert all(hint.nodes == ("n",) and hint.seq > 0 for hint in cluster.prefetches)
