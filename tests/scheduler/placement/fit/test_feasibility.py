"""Impossible requests are refused, and deployments that became impossible block no other job."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl import errors
from plexrl.ids import TenantId
from plexrl.scheduler.placement.capacity.needs import Need
from plexrl.scheduler.placement.capacity.node_pool import NodeKind
from plexrl.scheduler.placement.fit.feasibility import fits, is_possible
from plexrl.scheduler.rules.policies import POLICIES
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

BOUND_S = 600.0


def cluster_of(*gpus: int, policy: str = "isolated", **changes: object) -> FakeCluster:
    cluster = FakeCluster(policy=policy, starvation_bound_s=BOUND_S, **changes)
    for number, count in enumerate(gpus):
        cluster.join_node(count, f"n{number + 1}")
    cluster.join_router()
    return cluster


def alone(cluster: FakeCluster, job: str, workers: int, **fields: object) -> None:
    """A job with one exclusive deployment."""
    cluster.job(job)
    cluster.deploy(f"{job}/a", workers=workers, exclusive=True, **fields)


def placed(cluster: FakeCluster) -> list[str]:
    deployments = cluster.core._context.state.deployments.values()
    return sorted(each.deployment for each in deployments if each.placement.group is not None)


def reason(cluster: FakeCluster, deployment: str) -> tuple[str, str]:
    """(rule, reason) in the explanation of an operation of a waiting deployment."""
    operation = f"{deployment}:{cluster.now}"
    cluster.submit(operation, deployment, "barrier")
    explanation = cluster.explanation_of(operation)
    return explanation["rule"], explanation["reason"]


def drain(cluster: FakeCluster, node: str, *, is_draining: bool) -> None:
    cluster.send(ev.NodeDrainChanged(node=node, is_draining=is_draining))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gang", [0, 2])
def test_deployments_of_a_job_that_exceed_the_cluster_together_are_refused(
    policy: str, gang: int
) -> None:
    cluster = cluster_of(8, policy=policy)
    cluster.job("g", gang=gang)
    cluster.deploy("g/one", "rollout", workers=6)
    with pytest.raises(errors.CapacityError, match="12 GPUs at once") as refused:
        cluster.deploy("g/two", "rollout", workers=6)
    assert refused.value.details == {"workers": 12, "gpus": 8}
    cluster.deploy("g/three", "rollout", workers=2)
    assert placed(cluster) == ["g/one", "g/three"]


@pytest.mark.parametrize("policy", ["pack", "spread", "spread+backfill", "co-execution"])
def test_deployments_that_may_share_gpus_are_not_refused(policy: str) -> None:
    cluster = cluster_of(8, policy=policy)
    cluster.job("g")
    cluster.deploy("g/one", workers=6)
    cluster.deploy("g/two", workers=6)
    with pytest.raises(errors.CapacityError):
        cluster.deploy("g/three", workers=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_with_too_few_gpus_of_its_node_type_is_refused_whatever_others_are_there(
    policy: str,
) -> None:
    cluster = cluster_of(8, policy=policy)
    cluster.join_node(8, "other", node_type="other")
    cluster.join_node(8, "wanted", node_type="wanted")
    trace = DemandTrace(period_s=100.0, segments=(Segment(offset_s=60.0, duration_s=20.0),))
    cluster.job("g", gang=2)
    cluster.deploy("g/actor", workers=8, node_type="wanted", trace=trace)
    with pytest.raises(errors.CapacityError, match="12 GPUs at once"):
        cluster.deploy(
            "g/rollout", "rollout", workers=4, node_type="wanted", exclusive=True, shares=False
        )


def test_a_gang_that_fits_no_combination_of_node_kinds_is_refused() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.join_node(8, "x", node_type="x")
    cluster.join_node(8, "y", node_type="y")
    cluster.job("g", gang=3)
    cluster.deploy("g/one", workers=6)
    cluster.deploy("g/two", workers=6)
    with pytest.raises(errors.CapacityError):
        cluster.deploy("g/three", workers=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gang_made_impossible_by_a_lost_node_blocks_no_other_job(
    policy: str,
) -> None:
    cluster = cluster_of(4, 4, policy=policy, reservations=False)
    alone(cluster, "there", 4)
    cluster.job("g", gang=2)
    cluster.deploy("g/one", "rollout", workers=4)
    cluster.deploy("g/two", "rollout", workers=4)
    cluster.pass_time(BOUND_S + 1)
    assert placed(cluster) == ["there/a"]
    on = cluster.core.deployment_view("there/a", cluster.now)["ranks"][0]["node"]
    other = {"n1": "n2", "n2": "n1"}[on]
    cluster.lose_node(other)
    cluster.send(ev.JobFinished(job="there", outcome="completed"))
    alone(cluster, "small", 2)
    assert placed(cluster) == ["small/a"], "the gang cannot have these GPUs"
    rule, why = reason(cluster, "g/one")
    assert rule == "impossible"
    assert "8 GPUs at once" in why
    assert f"{other} is lost" in why
    assert cluster.core.status(cluster.now)["deployments_impossible"] == 2
    cluster.join_node(node=other)
    assert cluster.core.status(cluster.now)["deployments_impossible"] == 0
    alone(cluster, "late", 2)
    assert placed(cluster) == ["small/a"], "now it is passed by nobody again"
    cluster.send(ev.JobFinished(job="small", outcome="completed"))
    assert placed(cluster) == ["g/one", "g/two"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deployment_made_impossible_by_a_drain_blocks_no_other_job(policy: str) -> None:
    cluster = cluster_of(4, 4, policy=policy)
    alone(cluster, "there", 1)
    alone(cluster, "large", 8)
    cluster.pass_time(BOUND_S + 1)
    alone(cluster, "small", 1)
    assert placed(cluster) == ["there/a"]
    on = cluster.core.deployment_view("there/a", cluster.now)["ranks"][0]["node"]
    other = {"n1": "n2", "n2": "n1"}[on]
    drain(cluster, other, is_draining=True)
    alone(cluster, "later", 1)
    assert placed(cluster) == ["later/a", "small/a", "there/a"]
    assert f"{other} is being drained" in reason(cluster, "large/a")[1]
    drain(cluster, other, is_draining=False)
    for job in ("there", "small", "later"):
        assert "large/a" not in placed(cluster)
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
    assert placed(cluster) == ["large/a"]


def test_a_deployment_made_impossible_by_a_smaller_node_blocks_no_other_job() -> None:
    cluster = cluster_of(4, 4)
    alone(cluster, "there", 1)
    alone(cluster, "large", 8)
    cluster.pass_time(BOUND_S + 1)
    for node in ("n1", "n2"):
        cluster.nodes.pop(node)
        cluster.join_node(3, node)
    alone(cluster, "small", 1)
    assert placed(cluster) == ["small/a", "there/a"]
    assert reason(cluster, "large/a")[0] == "impossible"


def test_a_deployment_that_needs_gpus_of_its_own_job_is_impossible() -> None:
    cluster = cluster_of(4, 4)
    cluster.job("j")
    cluster.deploy("j/one", "rollout", workers=3)
    alone(cluster, "there", 4)
    cluster.deploy("j/two", "rollout", workers=4)
    cluster.pass_time(BOUND_S + 1)
    on = cluster.core.deployment_view("j/one", cluster.now)["ranks"][0]["node"]
    cluster.send(ev.JobFinished(job="there", outcome="completed"))
    assert placed(cluster) == ["j/one", "j/two"]
    cluster.lose_node({"n1": "n2", "n2": "n1"}[on])
    cluster.pass_time(cluster.config.node_replace_s + BOUND_S)
    alone(cluster, "small", 1)
    assert placed(cluster) == ["j/one", "small/a"]


def test_on_ray_a_lost_node_does_not_count_when_deployments_are_checked() -> None:
    cluster = cluster_of(4, 4, lost_nodes_return=False)
    cluster.lose_node("n2")
    cluster.job("j")
    with pytest.raises(errors.CapacityError):
        cluster.deploy("j/a", workers=8)
    cluster.lose_node("n1")
    with pytest.raises(errors.UnavailableError):
        cluster.deploy("j/a", workers=8)


kinds = st.dictionaries(
    st.builds(NodeKind, st.sampled_from("xy"), st.integers(1, 2)), st.integers(1, 8), max_size=3
)
some_needs = st.lists(
    st.builds(Need, st.integers(1, 6), st.sampled_from(("", "x", "y")), st.integers(0, 2)),
    max_size=5,
)


@settings(max_examples=examples(300), deadline=None)
@given(kinds, some_needs)
def test_needs_fit_if_some_choice_of_kinds_holds_them_all(
    free: dict[NodeKind, int], needs: list[Need]
) -> None:
    def holds(left: dict[NodeKind, int], rest: list[Need]) -> bool:
        if not rest:
            return True
        return any(
            holds({**left, kind: gpus - rest[0].workers}, rest[1:])
            for kind, gpus in left.items()
            if gpus >= rest[0].workers
            and rest[0].node_type in ("", kind.node_type)
            and kind.gpu_memory_bytes >= rest[0].gpu_memory_bytes
        )

    assert fits(free, needs) == holds(free, needs)


def test_the_status_counts_what_a_scan_of_all_deployments_counts() -> None:
    cluster = cluster_of(4, 4, policy="isolated")
    for index in range(3):
        alone(cluster, f"small{index}", 2)
        cluster.job(f"gang{index}", gang=2)
        for each in ("one", "two"):
            cluster.deploy(f"gang{index}/{each}", "rollout", workers=4)
    cluster.job("incomplete", gang=2)
    cluster.deploy("incomplete/one", "rollout", workers=4)
    cluster.lose_node("n1")
    context = cluster.core._context
    waiting = [context.state.deployment(name) for name in context.cluster.queues.waiting]
    found = sum(not is_possible(context.cluster, each) for each in waiting)
    assert cluster.core.status(cluster.now)["deployments_impossible"] == found
    assert cluster.core.status(cluster.now, TenantId("t"))["deployments_impossible"] == found
    assert 0 < found < len(waiting)


@pytest.mark.parametrize(
    ("kinds", "is_refused"), [(("NVIDIA T",), True), (("NVIDIA T", ""), False)]
)
def test_a_paced_deployment_is_refused_if_it_would_hold_real_gpus(
    kinds: tuple[str, ...], is_refused: bool
) -> None:
    cluster = FakeCluster(policy="pack")
    for kind in kinds:
        cluster.join_node(4, f"n-{kind}", gpu_kind=kind)
    cluster.job("g")
    if is_refused:
        with pytest.raises(errors.CapacityError, match="would hold while it sleeps"):
            cluster.deploy("g/one", workers=2, pace="h800:qwen2.5-7b")
    else:
        cluster.deploy("g/one", workers=2, pace="h800:qwen2.5-7b")
    cluster.deploy("g/two", workers=2)
