"""A controller that never pauses holds a shared group for seconds while others wait, and a burst of
usual length is not interrupted."""

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from plexrl.scheduler.dispatch.bursts import (
    BOUND_S_MIN,
    USUAL_FACTOR,
    is_after_burst,
)
from plexrl.scheduler.rules.switch_cost import interruption_s, round_trip_s
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.operations import OperationKind
from tests.examples import examples
from tests.scheduler.dispatch.shared_group import LONG, MOVES, SHORT, Member, Shared, Stream
from tests.scheduler.fake_cluster import FakeCluster

LONG_S = 1000.0

tenths = st.integers(1, 80).map(lambda tenths: tenths / 10.0)
members = st.builds(Member, work_s=tenths, load_s=tenths, offload_s=tenths)
MODEST = Member(work_s=0.3, load_s=0.1, offload_s=0.05)
"""As measured on a busy machine, where its controller pauses for 0.2 s."""


# Without shrinking: a failure must end in time.
unshrunk = settings(
    max_examples=examples(20), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


@unshrunk
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
    """For 20 times a switch to the other one and back, and for the operation and the switches
    around; never for longer than `burst_max_s` allows. Inside a tenant, too."""
    shared = Shared([holder, other], tenants=tenants)
    pause_s = pause_part * holder.round_trip_s
    shared.never_pauses("a", pause_s)
    shared.pauses("b", think_s)
    shared.run(LONG_S)
    step_s = holder.work_s + pause_s
    interruption_s = holder.round_trip_s + other.round_trip_s
    longest_s = min(300.0, max(20.0 * interruption_s, BOUND_S_MIN))
    waits_s = shared.waits_s()
    assert len(waits_s) > 2
    assert max(waits_s) <= longest_s + step_s + interruption_s + 1e-6


def test_a_deep_queue_inside_a_tenant_is_not_served_before_what_came_later() -> None:
    """HRRS alone would hold that its operations have waited since their submission."""
    shared = Shared([MODEST, Member(work_s=60.0, load_s=0.1, offload_s=0.05)], tenants="aa")
    shared.pauses("b", 5.0)
    # It is known how long b's operations take.
    shared.run(100.0)
    for _ in range(1000):
        shared.submit("a", LONG)
    shared.run(400.0)
    assert len(shared.waits_s()) > 4
    assert max(shared.waits_s()) <= 20.0 * 0.3 + MODEST.work_s + 0.3 + 1e-6


few_kinds = st.lists(st.sampled_from((LONG, SHORT)), min_size=1, max_size=20).map(tuple)
pauses_s = st.one_of(st.just(0.0), st.floats(1.0, 300.0))
streams = st.builds(
    Stream,
    bursts=st.lists(st.tuples(few_kinds, pauses_s), min_size=1, max_size=4).map(tuple),
    gap_s=st.sampled_from((0.0, 0.02)),
    declared_s=st.sampled_from((None, 1.0, 100.0, 290.0)),
)
varied = st.builds(
    Member,
    work_s=st.floats(0.1, 60.0),
    pass_s=st.floats(0.05, 1.0),
    load_s=st.floats(0.05, 4.0),
    offload_s=st.floats(0.05, 4.0),
)
LONG_OPERATIONS = Stream(bursts=(((LONG,) * 20, 0.0),), gap_s=0.0, declared_s=None)
DECLARED = Stream(bursts=(((SHORT,) * 20, 0.0),), gap_s=0.0, declared_s=290.0)
PAUSES_RARELY = Stream(bursts=(((SHORT,) * 900, 5.0),), gap_s=0.02, declared_s=None)
PAUSES = Stream(bursts=(((SHORT,), 5.0),), gap_s=0.0, declared_s=None)
SLOW = Member(work_s=43.0, load_s=0.1, offload_s=0.05)


@unshrunk
@given(varied, varied, streams, streams, st.sampled_from(("ab", "aa")))
@example(SLOW, MODEST, LONG_OPERATIONS, PAUSES, "aa")
@example(MODEST, MODEST, DECLARED, PAUSES, "ab")
@example(MODEST, MODEST, PAUSES_RARELY, PAUSES, "ab")
@example(MODEST, MODEST, PAUSES_RARELY, PAUSES, "aa")
def test_the_longest_wait_is_a_multiple_of_what_an_interruption_costs(
    one: Member, other: Member, of_one: Stream, of_other: Stream, tenants: str
) -> None:
    """Whatever controllers submit and declare: 20 times that cost, or 100 times for a burst of
    usual length, and an operation with the switches around it."""
    shared = Shared([one, other], tenants=tenants)
    shared.streams("a", of_one)
    shared.streams("b", of_other)
    shared.run(LONG_S)
    interruption_s = one.round_trip_s + other.round_trip_s
    longest_s = min(300.0, max(USUAL_FACTOR * 20.0 * interruption_s, BOUND_S_MIN))
    step_s = max(one.work_s, other.work_s, one.pass_s, other.pass_s) + interruption_s
    assert max(shared.waits_s()) <= longest_s + step_s + interruption_s + 1e-6


@unshrunk
@given(varied, varied, streams, streams, st.sampled_from(("ab", "aa")))
@example(MODEST, MODEST, PAUSES_RARELY, PAUSES, "ab")
def test_interruptions_of_members_that_pause_take_a_twentieth_at_most(
    one: Member, other: Member, of_one: Stream, of_other: Stream, tenants: str
) -> None:
    """Beside the switches to each of their bursts, which are needed anyway."""
    shared = Shared([one, other], {"burst_max_s": 1e6}, tenants=tenants)
    shared.streams("a", of_one)
    shared.streams("b", of_other)
    shared.run(LONG_S)
    interruption_s = one.round_trip_s + other.round_trip_s
    # The first moves are of unknown length, and the last one belongs to a burst to come.
    needed_s = (bursts_after_a_pause(shared, of_one, of_other) + 4) * interruption_s
    assert shared.moving_s() <= LONG_S / 20.0 + needed_s


def bursts_after_a_pause(shared: Shared, *streams: Stream) -> int:
    """Bursts of the controllers that pause at all."""
    pausing = {job for job, stream in zip("ab", streams, strict=True) if stream.pauses}
    return sum(name[0] in pausing for name in shared.arrivals)


@unshrunk
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
    """Bursts of ten operations and of minutes, with an interruption of a hundredth of that."""
    quick = Member(work_s=work_s, load_s=0.035 * work_s, offload_s=0.02 * work_s)
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


def test_few_long_operations_are_a_burst_like_any_other() -> None:
    long = Member(work_s=30.0, load_s=0.1, offload_s=0.05)
    shared = Shared([long, long])
    for job in "ab":
        shared.pauses(job, pause_s=1.0, operations=8)
    shared.run(10.0 * long.work_s)
    assert max(shared.waits_s()) <= long.work_s + 1.0


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
    segments = (Segment(offset_s=0.0, duration_s=20.0),)
    shared.deployment("a").demand.know(DemandTrace(period_s=400.0, segments=segments))
    shared.never_pauses("b")
    shared.run(20.0)
    demand = shared.deployment("a").demand
    for job in "ab":
        for kind in MOVES:
            shared.deployment(job).demand.estimates.observe(kind, 0, 0.1)
    assert demand.estimates.burst_seconds is None
    # 100 times two loads and two offloads.
    assert shared.bound_s("a") == pytest.approx(40.0)


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
    for index, job in enumerate("ababa"):
        # Moves are measured: an interruption takes four times a tenth of a second.
        cluster.submit(f"{job}:warm-{index}", f"{job}/actor", "optim_step")
        cluster.settle()
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.submit("b:1", "b/actor", "barrier")
    for index in range(1, 9):
        # The controller submits each operation before the one before it ends.
        cluster.submit(f"a:{index}", "a/actor", "barrier")
        cluster.pass_time(1.0)
        if index > 2:
            # It is longer than usual.
            reason = cluster.explanation_of("b:1")["reason"]
            assert reason.endswith(f"it yields in {8 - index} s at the latest")
        cluster.execute(cluster.runs[0])
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
    ("usual_s", "cut_s", "expected_s"),
    [
        (None, 0.0, 6.0),
        (None, 5.0, 6.0),
        (8.0, 0.0, 24.0),
        (8.0, 14.0, 10.0),
        (8.0, 40.0, 6.0),
        # Five times the bound at most.
        (150.0, 0.0, 30.0),
        (150.0, 30.0, 30.0),
        # Longer than any cycle does: the controller pauses too seldom.
        (301.0, 0.0, 6.0),
    ],
)
def test_the_bound_follows_from_the_usual_length_and_from_what_was_cut_off(
    usual_s: float | None, cut_s: float, expected_s: float
) -> None:
    shared = Shared([MODEST, MODEST])
    for job in "ab":
        shared.never_pauses(job)
    shared.run(50.0)
    demand = shared.deployment("a").demand
    demand.estimates.burst_seconds = usual_s
    demand.burst.cut_s = cut_s
    assert shared.bound_s("a") == pytest.approx(expected_s)


def test_a_bound_is_a_second_at_least_and_burst_max_s_at_most() -> None:
    shared = Shared([MODEST, MODEST], {"burst_max_s": 4.0})
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
