"""An admission pass places what a full scan would place, and considers few deployments."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.accounting.fair_shares import tenant_share
from plexrl.scheduler.admission.order import AdmissionKey, admission_key, blocks_others
from plexrl.scheduler.admission.queues.gangs import allowed_modes, place_all, why_not_yet
from plexrl.scheduler.admission.queues.reservations import ReservedCapacity, is_rival_of, reserve
from plexrl.scheduler.admission.walk import AdmissionWalk
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import gang_of
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment
from tests.examples import examples
from tests.scheduler.admission.slow_admission import SlowAdmission
from tests.scheduler.fake_cluster import FakeCluster

GPUS = 4
POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")


def trace(busy_s: float, period_s: float = 100.0) -> DemandTrace:
    segment = Segment(offset_s=0.0, duration_s=busy_s)
    return DemandTrace(period_s=period_s, segments=(segment,))


def by_walking(cluster: Cluster, now: float) -> list[DeploymentId]:
    """The deployments that get GPUs if all are considered in order, one by one."""
    placed: list[DeploymentId] = []
    ahead: set[tuple[str, int]] = set()
    heads: list[list[Deployment]] = []
    reservations: list[ReservedCapacity] = []
    left = {name: cluster.state.deployment(name) for name in cluster.queues.waiting}

    def turn(each: Deployment) -> AdmissionKey:
        share = tenant_share(cluster.holdings, cluster.state.job(each.job).tenant, now)
        return admission_key(cluster, each, share, now)

    while left:
        deployment = min(left.values(), key=turn)
        gang = gang_of(cluster.queues, deployment)
        for each in gang:
            left.pop(each.deployment, None)
        if why_not_yet(cluster, deployment) is not None:
            continue
        only = allowed_modes(cluster, gang, ahead, now)
        types = [each.spec.node_type for each in gang]
        if place_all(cluster, gang, only, reservations, now):
            placed += [each.deployment for each in gang]
        elif blocks_others(cluster, deployment, now):
            if not cluster.settings.policy.backfills:
                ahead.update((each.spec.node_type, each.spec.workers) for each in gang)
            elif not any(is_rival_of(head, types) for head in heads):
                heads.append(gang)
                if reserve(cluster, deployment, now):
                    reservations.append(ReservedCapacity(cluster, deployment.deployment, now))
                else:
                    ahead.update((each.spec.node_type, each.spec.workers) for each in gang)
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


Request = tuple[str, int, float, int, float, int, int, str, bool]


def backlog(
    policy: str, wanted: list[Request], *, is_tight: bool, reservations: bool = True
) -> FakeCluster:
    """Two nodes of one type each, and a backlog of three tenants, one with a quota."""
    cluster = FakeCluster(
        policy=policy,
        searches_max=10_000,
        residents_max=3 if is_tight else 8,
        reservations=reservations,
    )
    cluster.join_node(GPUS, "n1", host_memory_bytes=8 << 20, node_type="x")
    cluster.join_node(GPUS, "n2", host_memory_bytes=4 << 20, node_type="y")
    for name in ("t", "u", "v"):
        cluster.send(ev.TenantCreated(tenant=name, key_digest=name, is_operator=True))
    limits = {"jobs_max": None, "gpu_seconds_max": None}
    cluster.send(ev.TenantConfigured(tenant="u", weight=2.0, gpus_max=5, **limits))
    for number, request in enumerate(wanted):
        tenant, workers, busy_s, state_bytes, pause_s, priority, gang, node_type, alone = request
        job = f"j{number}"
        fields: dict[str, object] = {"trace": trace(busy_s)} if busy_s else {}
        fields |= {"node_type": node_type, "exclusive": alone}
        is_gang = gang > 0 and workers <= 2
        cluster.job(job, tenant, priority=priority, gang=gang if is_gang else 0)
        cluster.deploy(f"{job}/a", workers=workers, state_bytes=state_bytes, **fields)
        if is_gang:
            cluster.deploy(f"{job}/b", workers=workers, state_bytes=state_bytes, **fields)
        cluster.pass_time(pause_s)
    return cluster


def end_a_job(cluster: FakeCluster, chosen: int) -> tuple[Cluster, ev.JobFinished] | None:
    """A second core just before the pass that the end of a chosen job causes, and the end."""
    context = cluster.core._context
    holders = sorted(
        {each.job for each in context.state.deployments.values() if each.placement.group}
    )
    if not holders:
        return None
    event = ev.JobFinished(job=holders[chosen % len(holders)], outcome="completed")
    other = SchedulerCore.restore(cluster.config, cluster.core.dump())
    other._handlers[ev.JobFinished](event, cluster.now)
    return other._context.cluster, event


endings = st.lists(st.integers(0, 99), min_size=1, max_size=6)


SMALL: Request = ("t", 1, 0.0, 0, 0.0, 0, 0, "", False)


# The two of a gang share GPUs, so it leaves enough for the one that has a reservation before it.
@example(
    policy="co-execution",
    wanted=[
        ("t", 3, 0.0, 0, 0.0, 0, 0, "", False),
        *[SMALL] * 13,
        ("t", 1, 0.0, 0, 0.0, 1, 0, "", False),
        *[("t", 1, 0.0, 0, 300.0, 0, 0, "", False)] * 4,
        ("t", 4, 0.0, 0, 300.0, 1, 0, "", False),
        ("t", 2, 10.0, 0, 300.0, 1, 2, "", False),
    ],
    ending=[0],
    is_tight=False,
)
# The two of a gang begin a group together, which a deployment of another tenant joins.
@example(
    policy="spread",
    wanted=[
        ("v", 2, 20.0, 0, 0.0, 0, 2, "y", True),
        ("t", 3, 20.0, 1 << 20, 1.0, 1, 0, "y", False),
        ("v", 3, 10.0, 3 << 20, 300.0, -1, 0, "y", False),
        ("u", 4, 0.0, 3 << 20, 0.0, 1, 2, "x", True),
        ("u", 4, 45.0, 1 << 20, 1.0, -1, 0, "", True),
        ("t", 2, 0.0, 3 << 20, 0.0, 1, 0, "x", False),
        ("t", 2, 0.0, 0, 300.0, 0, 0, "y", True),
        ("t", 2, 30.0, 1 << 20, 0.0, 1, 2, "x", True),
        ("u", 2, 20.0, 3 << 20, 0.0, 0, 2, "y", False),
        ("u", 4, 10.0, 3 << 20, 300.0, 0, 0, "", False),
        ("t", 3, 20.0, 1 << 20, 1.0, 0, 0, "", True),
        ("t", 1, 20.0, 0, 0.0, 1, 2, "y", False),
        ("u", 1, 30.0, 3 << 20, 0.0, -1, 0, "", False),
        ("u", 4, 45.0, 1 << 20, 1.0, 0, 0, "y", False),
        ("v", 4, 20.0, 0, 1.0, 0, 2, "x", True),
        ("t", 1, 20.0, 0, 300.0, -1, 0, "", False),
    ],
    ending=[98, 36],
    is_tight=True,
)
@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(POLICIES), requests, endings, st.booleans())
def test_a_pass_places_the_same_as_a_scan_of_all_waiting_deployments(
    policy: str, wanted: list[Request], ending: list[int], is_tight: bool
) -> None:
    cluster = backlog(policy, wanted, is_tight=is_tight)
    for chosen in ending:
        found = end_a_job(cluster, chosen)
        if found is None:
            return
        other, event = found
        expected = by_walking(other, cluster.now)
        waited = set(cluster.core._context.cluster.queues.waiting)
        cluster.send(event)
        assert waited - set(cluster.core._context.cluster.queues.waiting) == set(expected)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(("isolated", "pack")), requests, endings, st.booleans())
def test_a_pass_places_what_an_independent_oracle_places(
    policy: str, wanted: list[Request], ending: list[int], is_tight: bool
) -> None:
    cluster = backlog(policy, wanted, is_tight=is_tight, reservations=False)
    for chosen in ending:
        found = end_a_job(cluster, chosen)
        if found is None:
            return
        other, event = found
        waiting = [other.state.deployments[name] for name in other.queues.waiting]
        oracle = SlowAdmission(cluster.config, other.state, cluster.now)
        expected = oracle.run(waiting)
        if oracle.is_tied:
            return
        waited = set(cluster.core._context.cluster.queues.waiting)
        cluster.send(event)
        assert waited - set(cluster.core._context.cluster.queues.waiting) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_few_deployments_of_a_backlog_without_equal_ones_are_considered(policy: str) -> None:
    cluster = FakeCluster(policy=policy, searches_max=5)
    cluster.start_node(GPUS)
    for number in range(120):
        cluster.job(f"j{number}")
        cluster.deploy(f"j{number}/a", workers=1, trace=trace(20.0 + number / 9, 100.0 + number))
    context = cluster.core._context
    placed = [each for each in context.state.deployments.values() if each.placement.group]
    cluster.send(ev.JobFinished(job=placed[0].job, outcome="completed"))
    assert len(context.cluster.queues.waiting) > 80
    walk = AdmissionWalk(context.cluster, cluster.now, None)
    assert walk.run() == []
    assert len(walk.tried) <= 6


def test_capacity_for_a_blocking_deployment_is_not_offered_to_the_backlog() -> None:
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
    assert len(context.cluster.queues.waiting) == 51, (
        "three GPUs are free, and kept for the large job"
    )
    walk = AdmissionWalk(context.cluster, cluster.now, None)
    assert walk.run() == []
    assert len(walk.tried) <= 2


@pytest.mark.parametrize("policy", ["pack", "spread", "spread+backfill"])
@pytest.mark.parametrize("first", [{"exclusive": True}, {"trace": trace(90.0)}])
def test_no_newcomer_joins_a_group_that_a_blocking_job_of_another_size_needs(
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
    assert list(cluster.core._context.cluster.queues.waiting) == ["first/a", "newcomer/a"]
    cluster.send(ev.JobFinished(job="there", outcome="completed"))
    assert "first/a" not in cluster.core._context.cluster.queues.waiting


@pytest.mark.parametrize("policy", ["pack", "spread+backfill"])
def test_a_deployment_that_did_not_fit_joins_a_group_formed_before_its_turn(policy: str) -> None:
    cluster = FakeCluster(policy=policy, reservations=False)
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
    waiting = cluster.core._context.cluster.queues.waiting
    assert list(waiting) == ["first/a", "early/a", "makes/a", "late/a"]
    # Free GPUs of any type are kept for the first, and there is no group that anybody could join
    # until one is made of those that it does not want.
    cluster.send(ev.JobFinished(job="there-x", outcome="completed"))
    assert list(waiting) == ["first/a", "early/a"]


@pytest.mark.parametrize("policy", POLICIES)
def test_few_gangs_of_a_backlog_are_considered(policy: str) -> None:
    cluster = FakeCluster(policy=policy, searches_max=5)
    cluster.start_node(GPUS)
    for number in range(100):
        cluster.job(f"j{number}", gang=2, expected_s=60.0 + number)
        for name, kind in (("a", "train"), ("b", "rollout")):
            fields = {"trace": trace(90.0 + number / 90)} if kind == "train" else {}
            cluster.deploy(f"j{number}/{name}", kind, workers=2, **fields)
    context = cluster.core._context
    assert len(context.cluster.queues.waiting) == 198
    for pause_s in (0.0, cluster.config.starvation_bound_s):
        cluster.pass_time(pause_s)
        walk = AdmissionWalk(context.cluster, cluster.now, None)
        assert walk.run() == []
        assert len(walk.tried) <= 20
    placed = {each.job for each in context.state.deployments.values() if each.placement.group}
    cluster.send(ev.JobFinished(job=placed.pop(), outcome="completed"))
    assert len(context.cluster.queues.waiting) == 196


def test_the_longest_job_goes_first_if_the_setting_says_so_however_long_others_wait() -> None:
    cluster = FakeCluster(policy="isolated", longest_first=True)
    cluster.start_node(GPUS)
    for job, expected_s in (("running", 60.0), ("short", 60.0), ("long", 7200.0)):
        cluster.job(job, expected_s=expected_s)
        cluster.deploy(f"{job}/actor", workers=GPUS)
        cluster.pass_time(60.0)
    cluster.send(ev.JobFinished(job="running", outcome="completed"))
    deployments = cluster.core._context.state.deployments.values()
    assert [each.job for each in deployments if each.placement.group] == ["long"]
