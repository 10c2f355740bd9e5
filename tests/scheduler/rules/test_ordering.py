"""Each ordering by example, and the default one against its formula."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.ids import DeploymentId
from plexrl.scheduler.rules.hrrs import Candidate
from plexrl.scheduler.rules.ordering import ORDERINGS, first, make_ordering
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster, config

seconds = st.floats(0, 1e4)
candidates = st.builds(
    Candidate,
    name=st.text("abcdef", min_size=1, max_size=3),
    arrived_at=seconds,
    service_s=st.floats(0.01, 1e3),
    setup_s=st.floats(0, 100),
    head_s=st.floats(0.01, 1e3),
    cycle_s=seconds,
    served_at=seconds,
    turns_away=st.integers(1, 8),
)
waiting_lists = st.lists(candidates, min_size=1, max_size=8, unique_by=lambda c: c.name)

OLD = Candidate(
    name="old", arrived_at=0, service_s=100, setup_s=8, head_s=20, served_at=50, turns_away=2
)
SHORT = Candidate(
    name="short", arrived_at=40, service_s=20, setup_s=8, head_s=18, served_at=60, turns_away=3
)
NEXT = Candidate(
    name="next", arrived_at=90, service_s=100, setup_s=8, head_s=90, served_at=70, turns_away=1
)
UNSERVED = replace(NEXT, name="unserved", served_at=0, turns_away=4)


def chosen(rule: str, *waiting: Candidate, now: float = 100) -> str:
    found = first(make_ordering(rule), waiting, now)
    assert found is not None
    return found.name


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("hrrs", "short"),
        ("hrrs-operations", "old"),
        ("fifo-bursts", "old"),
        ("fifo-operations", "old"),
        ("shortest-first", "short"),
        ("least-recently-served", "unserved"),
        ("round-robin", "next"),
    ],
)
def test_each_ordering_chooses_by_its_own_key(rule: str, wanted: str) -> None:
    assert chosen(rule, OLD, SHORT, NEXT, UNSERVED) == wanted


def test_a_shorter_burst_goes_first_when_waits_are_equal() -> None:
    assert chosen("hrrs", OLD, replace(SHORT, arrived_at=0)) == "short"


def test_a_shorter_cycle_goes_first_when_ratios_are_equal() -> None:
    slow, fast = replace(OLD, cycle_s=600), replace(OLD, name="zz", cycle_s=300)
    assert chosen("hrrs", slow, fast) == "zz"


def test_first_come_first_served_keeps_to_the_resident_among_equals() -> None:
    resident = replace(OLD, name="resident", setup_s=0)
    assert chosen("fifo-operations", OLD, resident) == "resident"


@given(waiting_lists, seconds)
def test_hrrs_chooses_the_highest_ratio_for_a_second_of_cycle(
    waiting: list[Candidate], now: float
) -> None:
    best = None
    for c in waiting:
        s = c.service_s + c.setup_s
        w = now - c.arrived_at if now > c.arrived_at else 0.0
        cycle = c.cycle_s
        if cycle < s:
            cycle = s
        if cycle > 8 * s:
            cycle = 8 * s
        rank = (-((w + s) / s) / cycle, c.arrived_at, c.name)
        if best is None or rank < best:
            best = rank
    assert best is not None
    assert chosen("hrrs", *waiting, now=now) == best[2]


@given(waiting_lists, seconds)
def test_the_literal_rule_is_the_papers_formula_of_single_operations(
    waiting: list[Candidate], now: float
) -> None:
    def rank(c: Candidate) -> tuple[float, float, str]:
        s = c.head_s + c.setup_s
        return (-((max(0.0, now - c.arrived_at) + s) / s), c.arrived_at, c.name)

    assert chosen("hrrs-operations", *waiting, now=now) == min(waiting, key=rank).name


@given(st.sampled_from(sorted(ORDERINGS)), waiting_lists, seconds)
def test_the_choice_does_not_depend_on_the_order_of_the_list(
    rule: str, waiting: list[Candidate], now: float
) -> None:
    assert chosen(rule, *waiting, now=now) == chosen(rule, *reversed(waiting), now=now)


def test_without_candidates_none_is_chosen() -> None:
    assert first(make_ordering("hrrs"), [], 0.0) is None


def test_an_unknown_rule_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(InvalidRequestError, match="round-robin"):
        config(ordering="lifo")


def waiting_rival(ordering: str) -> FakeCluster:
    """`a` has run an operation of its burst and submits the next; `b` waits."""
    cluster = FakeCluster(ordering=ordering, burst_interruptions=0.0)
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.pass_time(5.0)
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.execute(cluster.runs[0])
    return cluster


@pytest.mark.parametrize("rule", sorted(ORDERINGS))
def test_only_burst_orderings_keep_a_burst_together(rule: str) -> None:
    cluster = waiting_rival(rule)
    running = [run.kind.value for run in cluster.runs]
    assert running == (["optim_step"] if make_ordering(rule).holds_bursts else ["offload"])
    cluster.settle()
    assert cluster.state_of("a:2") == cluster.state_of("b:1") == "finished"


@pytest.mark.parametrize("rule", sorted(ORDERINGS))
def test_only_burst_orderings_wait_for_a_pause_inside_a_burst(rule: str) -> None:
    cluster = FakeCluster(ordering=rule)
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.execute(cluster.runs[0])
    holds = make_ordering(rule).holds_bursts
    assert [run.kind.value for run in cluster.runs] == ([] if holds else ["offload"])


@pytest.mark.parametrize(
    ("gap_s", "held_s"), [(None, 0.05), (1.0, 4.0), (4.9, 4 * 4.9), (6.0, 20.0)]
)
def test_a_paused_burst_holds_the_group_for_four_usual_gaps_or_a_switch_if_that_is_shorter(
    gap_s: float | None, held_s: float
) -> None:
    """A switch away and back takes 20 s here."""
    cluster = FakeCluster()
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    estimates = cluster.core._context.state.deployment(DeploymentId("a/actor")).demand.estimates
    estimates.seconds_by_kind |= {OperationKind.OFFLOAD: 12.0, OperationKind.LOAD: 8.0}
    estimates.gap_seconds = gap_s
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.execute(cluster.runs[0])
    cluster.pass_time(held_s - 0.01)
    assert cluster.runs == []
    cluster.pass_time(0.02)
    assert [run.kind.value for run in cluster.runs] == ["offload"]
