"""A gang counts as possible exactly if an empty cluster gives it its GPUs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import CapacityError, ModelDoesNotFitError
from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.fit.feasibility import is_possible
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.placement.fit.test_sharing_search import Asked, Kind, asked, cluster_of, deploy
from tests.scheduler.placement.fit.test_sharing_search import kinds as node_kinds

POLICIES = ("isolated", "pack", "spread+backfill")

H200 = "NVIDIA H200"


def full_cluster(kinds: dict[str, Kind], policy: str, members_max: int, gang: int) -> FakeCluster:
    """Another job has all GPUs; the gang's job has no deployments yet."""
    cluster = cluster_of(kinds, job="other", policy=policy, residents_max=members_max)
    for name, kind in kinds.items():
        cluster.deploy(f"other/{name}", workers=kind.gpus, node_type=name, exclusive=True)
    cluster.job("j", gang=gang)
    return cluster


def outcome(cluster: FakeCluster, gang: list[Asked]) -> tuple[bool, bool]:
    """(whether the gang that waits is possible, whether it gets GPUs once the other job ends)."""
    for index, each in enumerate(gang):
        deploy(cluster, f"d{index}", each)
    context = cluster.core._context
    members = [context.state.deployment(DeploymentId(f"j/d{i}")) for i in range(len(gang))]
    assert all(each.placement.group is None for each in members)
    expected = is_possible(context.cluster, members[0])
    cluster.send(ev.JobFinished(job="other", outcome="completed"))
    return expected, all(each.placement.group is not None for each in members)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(POLICIES),
    node_kinds,
    st.lists(asked, min_size=2, max_size=5),
    st.integers(1, 3),
)
def test_a_waiting_gang_is_possible_if_and_only_if_it_gets_its_gpus(
    policy: str, kinds: dict[str, Kind], gang: list[Asked], members_max: int
) -> None:
    cluster = full_cluster(kinds, policy, members_max, len(gang))
    try:
        expected, is_placed = outcome(cluster, gang)
    except (CapacityError, ModelDoesNotFitError):
        return
    assert expected == is_placed


@pytest.mark.parametrize("policy", POLICIES)
def test_gpus_of_a_requested_type_are_not_taken_by_those_that_may_have_any(policy: str) -> None:
    kinds = {"x": Kind(4, 10, H200), "y": Kind(2, 6, "NVIDIA A10")}
    gang = [Asked(2, 5, 2, exclusive=True), Asked(1, 6, 0, exclusive=True, node_type="y")]
    assert outcome(full_cluster(kinds, policy, 3, 2), gang) == (True, True)


@pytest.mark.parametrize("policy", POLICIES)
def test_larger_memory_is_not_taken_by_those_that_need_little(policy: str) -> None:
    kinds = {"x": Kind(2, 6, "NVIDIA A10"), "y": Kind(2, 10, H200)}
    gang = [Asked(1, 4, 0, exclusive=True)] * 2 + [Asked(1, 9, 0, exclusive=True)] * 2
    assert outcome(full_cluster(kinds, policy, 3, 4), gang) == (True, True)


@pytest.mark.parametrize("policy", ["pack", "spread+backfill"])
def test_a_rollout_takes_turns_if_others_of_its_gang_need_the_gpus(policy: str) -> None:
    """With GPUs of its own it would leave none for the two that share with nobody."""
    gang = [
        Asked(2, 3, 3, is_rollout=True),
        Asked(2, 10, 1),
        Asked(1, 7, 1, is_rollout=True, exclusive=True),
        Asked(1, 6, 2, exclusive=True),
    ]
    cluster = full_cluster({"x": Kind(4, 10, "")}, policy, 2, len(gang))
    assert outcome(cluster, gang) == (True, True)
    state = cluster.core._context.state
    groups = {
        name: state.deployment(DeploymentId(f"j/{name}")).placement.group for name in ("d0", "d1")
    }
    assert groups["d0"] == groups["d1"]


@pytest.mark.parametrize("policy", ["pack", "spread+backfill"])
@pytest.mark.parametrize("is_rollout", [True, False])
def test_one_that_names_a_type_shares_with_one_that_names_none(
    policy: str, is_rollout: bool
) -> None:
    gang = [Asked(2, 5, 2, is_rollout=is_rollout), Asked(2, 10, 3, node_type="x")]
    cluster = full_cluster({"x": Kind(3, 10, ""), "y": Kind(1, 10, "NVIDIA A10")}, policy, 3, 2)
    assert outcome(cluster, gang) == (True, True)
