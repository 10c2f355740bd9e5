"""A pass finds whom a walk past everybody who waits would have found, and looks at few of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler import SchedulerCore
from plexrl.scheduler.admission import admission_pass
from plexrl.scheduler.admission.fair_shares import tenant_share
from plexrl.scheduler.admission.fit.feasibility import gang_of
from plexrl.scheduler.admission.order import AdmissionKey, admission_key, blocks_others
from plexrl.scheduler.admission.queues.gangs import allowed_modes, place_all, why_not_yet
from plexrl.scheduler.core.context import Context
from plexrl.scheduler.state import events as ev
from plexrl.scheduler.state.demand import DemandTrace, Segment
from plexrl.scheduler.state.records import Deployment
from tests.scheduler.fake_cluster import FakeCluster

GPUS = 4
POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")


def trace(busy_s: float, period_s: float = 100.0) -> DemandTrace:
    segment = Segment(offset_s=0.0, duration_s=busy_s)
    return DemandTrace(period_s=period_s, segments=(segment,))


def by_walking(context: Context, now: float) -> list[DeploymentId]:
    """Whom the rules give GPUs, each looked at in turn, with nothing known of any line."""
    placed: list[DeploymentId] = []
    ahead: set[tuple[str, int]] = set()
    left = {name: context.deployment(name) for name in context.waiting}

    def turn(each: Deployment) -> AdmissionKey:
        share = tenant_share(context, context.job(each.job).tenant, now)
        return admission_key(context, each, share, now)

    while left:
        deployment = min(left.values(), key=turn)
        gang = gang_of(context, deployment)
        for each in gang:
            left.pop(each.deployment, None)
        if why_not_yet(context, deployment) is not None:
            continue
        only = allowed_modes(context, gang, ahead, now)
        if place_all(context, gang, only, now):
            placed += [each.deployment for each in gang]
        elif blocks_others(context, deployment, now):
            ahead.update((each.node_type, each.workers) for each in gang)
    return placed


requests = st.lists(
    st.tuples(
        st.sampled_from(("t", "t", "u", "v")),
        st.integers(1, GPUS),
        st.sampled_from((0.0, 10.0, 20.0, 30.0, 45.0, 45.0)),
        st.sampled_from((0, 1 << 20, 3 << 20)),
        st.sampled_from((0.0, 1.0, 300.0)),
        st.integers(-1, 1),
        st.sampled_from((0, 0, 0, 2)),
        st.sampled_from(("", "", "x", "y")),
        st.booleans(),
    ),
    min_size=8,
    max_size=30,
)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(POLICIES),
    requests,
    st.lists(st.integers(0, 99), min_size=1, max_size=6),
    st.booleans(),
)
def test_a_pass_places_whom_a_walk_past_everybody_places(
    policy: str,
    wanted: list[tuple[str, int, float, int, float, int, int, str, bool]],
    ending: list[int],
    is_tight: bool,
) -> None:
    cluster = FakeCluster(policy=policy, searches_max=10_000, residents_max=3 if is_tight else 8)
    cluster.join_node(GPUS, "n1", host_memory_bytes=8 << 20, node_type="x")
    cluster.join_node(GPUS, "n2", host_memory_bytes=4 << 20, node_type="y")
    for name in ("t", "u", "v"):
        cluster.send(ev.TenantCreated(tenant=name, key_digest=name, is_operator=True))
    limits = {"jobs_max": None, "gpu_seconds_max": None}
    cluster.send(ev.TenantConfigured(tenant="u", weight=2.0, gpus_max=5, **limits))
    for number, wish in enumerate(wanted):
        tenant, workers, busy_s, state_bytes, pause_s, priority, gang, node_type, alone = wish
        job = f"j{number}"
        fields: dict[str, object] = {"trace": trace(busy_s)} if busy_s else {}
        fields |= {"node_type": node_type, "exclusive": alone}
        is_gang = gang > 0 and workers <= 2
        cluster.job(job, tenant, priority=priority, gang=gang if is_gang else 0)
        cluster.deploy(f"{job}/a", workers=workers, state_bytes=state_bytes, **fields)
        if is_gang:
            cluster.deploy(f"{job}/b", workers=workers, state_bytes=state_bytes, **fields)
        cluster.pass_time(pause_s)
    for chosen in ending:
        context = cluster.core._context
        holders = sorted({each.job for each in context.state.deployments.values() if each.group})
        if not holders:
            return
        job = holders[chosen % len(holders)]
        other = SchedulerCore.restore(cluster.config, cluster.core.dump())
        # One core stops short of the pass that the end of the job calls for.
        other._handlers[ev.JobFinished](ev.JobFinished(job=job, outcome="completed"), cluster.now)
        expected = by_walking(other._context, cluster.now)
        waited = set(context.waiting)
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
        assert waited - set(context.waiting) == set(expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_backlog_of_which_no_two_are_alike_few_are_looked_at(policy: str) -> None:
    cluster = FakeCluster(policy=policy, searches_max=5)
    cluster.start_node(GPUS)
    for number in range(120):
        cluster.job(f"j{number}")
        cluster.deploy(f"j{number}/a", workers=1, trace=trace(20.0 + number / 9, 100.0 + number))
    context = cluster.core._context
    placed = [each for each in context.state.deployments.values() if each.group]
    cluster.send(ev.JobFinished(job=placed[0].job, outcome="completed"))
    assert len(context.waiting) > 80
    looks = admission_pass.AdmissionPass(context, cluster.now, None)
    assert looks.run() == []
    assert len(looks._seen) <= 6


def test_the_room_of_who_may_not_be_passed_is_not_offered_to_the_backlog_behind_it() -> None:
    cluster = FakeCluster(policy="pack", load_max=0.5)
    cluster.start_node(GPUS)
    cluster.job("small")
    cluster.deploy("small/a", workers=1, trace=trace(40.0))
    cluster.job("large")
    cluster.deploy("large/a", workers=GPUS, trace=trace(40.0))
    cluster.pass_time(cluster.config.starvation_bound_s)
    for number in range(50):
        cluster.job(f"j{number}")
        cluster.deploy(f"j{number}/a", workers=1, trace=trace(20.0 + number / 20))
    context = cluster.core._context
    assert len(context.waiting) == 51, "three GPUs are free, and kept for the large job"
    looks = admission_pass.AdmissionPass(context, cluster.now, None)
    assert looks.run() == []
    assert len(looks._seen) <= 2


@pytest.mark.parametrize("policy", ["pack", "spread", "spread+backfill"])
@pytest.mark.parametrize("first", [{"exclusive": True}, {"trace": trace(90.0)}])
def test_no_newcomer_joins_a_group_that_a_job_of_another_size_may_not_be_passed_for(
    policy: str, first: dict[str, object]
) -> None:
    cluster = FakeCluster(policy=policy)
    cluster.join_node(GPUS, node_type="x")
    cluster.job("there")
    cluster.deploy("there/a", workers=GPUS, node_type="x", trace=trace(20.0))
    cluster.job("first")
    cluster.deploy("first/a", workers=GPUS, **first)
    cluster.pass_time(cluster.config.starvation_bound_s)
    cluster.job("newcomer")
    cluster.deploy("newcomer/a", workers=GPUS, node_type="x", trace=trace(20.0))
    assert list(cluster.core._context.waiting) == ["first/a", "newcomer/a"]
    cluster.send(ev.JobFinished(job="there", outcome="completed"))
    assert "first/a" not in cluster.core._context.waiting


@pytest.mark.parametrize("policy", ["pack", "spread+backfill"])
def test_who_had_no_room_any_more_joins_a_group_that_is_made_before_its_turn(policy: str) -> None:
    cluster = FakeCluster(policy=policy)
    for node_type in ("x", "y"):
        cluster.join_node(GPUS, f"n-{node_type}", node_type=node_type)
        cluster.job(f"there-{node_type}")
        there = {"workers": GPUS, "node_type": node_type, "exclusive": True}
        cluster.deploy(f"there-{node_type}/a", **there)
    cluster.job("first")
    cluster.deploy("first/a", workers=1, node_type="y")
    cluster.pass_time(cluster.config.starvation_bound_s)
    for name, node_type, busy_s in (("early", "", 20.0), ("makes", "x", 20.0), ("late", "", 21.0)):
        cluster.job(name)
        cluster.deploy(f"{name}/a", workers=GPUS, node_type=node_type, trace=trace(busy_s))
        cluster.pass_time(1.0)
    waiting = cluster.core._context.waiting
    assert list(waiting) == ["first/a", "early/a", "makes/a", "late/a"]
    # Free GPUs of any type are kept for the first, and there is no group that anybody could join
    # until one is made of those that it does not want.
    cluster.send(ev.JobFinished(job="there-x", outcome="completed"))
    assert list(waiting) == ["first/a", "early/a"]


@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_backlog_of_gangs_few_are_looked_at(policy: str) -> None:
    cluster = FakeCluster(policy=policy, searches_max=5)
    cluster.start_node(GPUS)
    for number in range(100):
        cluster.job(f"j{number}", gang=2, expected_s=60.0 + number)
        for name, kind in (("a", "train"), ("b", "rollout")):
            fields = {"trace": trace(90.0 + number / 90)} if kind == "train" else {}
            cluster.deploy(f"j{number}/{name}", kind, workers=2, **fields)
    context = cluster.core._context
    assert len(context.waiting) == 198
    for pause_s in (0.0, cluster.config.starvation_bound_s):
        cluster.pass_time(pause_s)
        looks = admission_pass.AdmissionPass(context, cluster.now, None)
        assert looks.run() == []
        assert len(looks._seen) <= 20
    placed = {each.job for each in context.state.deployments.values() if each.group}
    cluster.send(ev.JobFinished(job=placed.pop(), outcome="completed"))
    assert len(context.waiting) == 196


def test_jobs_of_any_expected_lengths_stand_in_few_queues() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(GPUS)
    for number in range(200):
        cluster.job(f"j{number}", expected_s=1.5**number % 1e9)
        cluster.deploy(f"j{number}/a", workers=1)
    (owners,) = cluster.core._context.waiting.heads.values()
    (indexes,) = owners.values()
    assert len(indexes) <= 19


def test_a_pass_opens_no_queues_of_tenants_whose_turn_does_not_come() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(GPUS)
    for number in range(100):
        cluster.job(f"j{number}", f"t{number}", priority=-number)
        cluster.deploy(f"j{number}/a", workers=GPUS)
    context = cluster.core._context
    cluster.core._handlers[ev.JobFinished](
        ev.JobFinished(job="j0", outcome="completed"), cluster.now
    )
    looks = admission_pass.AdmissionPass(context, cluster.now, None)
    assert len(looks.run()) == 1
    assert len(looks._unreached) >= 90
