"""A job is refused only if no division of its deployments into groups fits the empty cluster."""

from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import CapacityError, ModelDoesNotFitError
from plexrl.ids import DeploymentId
from plexrl.model.memory.device_memory import DeviceMemory, MemoryTerm
from plexrl.scheduler.placement.fit.feasibility import fits, least_needs
from plexrl.scheduler.placement.fit.sharing_search import fit_in_groups
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

GIB = 1 << 30


class Asked(NamedTuple):
    """One deployment of a job."""

    workers: int
    need: int
    kept: int
    is_rollout: bool = False
    exclusive: bool = False
    node_type: str = ""


class Kind(NamedTuple):
    """The only node of its type."""

    gpus: int
    memory: int
    gpu_kind: str


def cluster_of(kinds: dict[str, Kind], job: str = "j", **changes: object) -> FakeCluster:
    cluster = FakeCluster(**{"policy": "pack", **changes})
    for name, kind in kinds.items():
        cluster.join_node(kind.gpus, name, node_type=name, gpu_kind=kind.gpu_kind)
        cluster.nodes[name] = type(cluster.nodes[name])(
            node=name,
            gpus=kind.gpus,
            statemanager=f"sm:{name}",
            node_type=name,
            gpu_kind=kind.gpu_kind,
            gpu_memory_bytes=kind.memory * GIB,
            host_memory_bytes=1000 * GIB,
        )
        cluster.join_node(node=name)
    cluster.join_router()
    cluster.job(job)
    return cluster


def deploy(cluster: FakeCluster, name: str, asked: Asked) -> None:
    terms = (
        MemoryTerm(name="weights", nbytes=(asked.need - asked.kept) * GIB),
        MemoryTerm(name="CUDA context", nbytes=asked.kept * GIB, stays=True),
    )
    cluster.deploy(
        f"j/{name}",
        "rollout" if asked.is_rollout else "train",
        workers=asked.workers,
        node_type=asked.node_type,
        exclusive=asked.exclusive,
        shares=True,
        state_bytes=asked.workers * (asked.need - asked.kept) * GIB,
        memory=DeviceMemory(terms=terms),
    )


def test_three_that_cannot_all_take_turns_share_as_far_as_they_can() -> None:
    """Of 10 GiB one needs 9, so it shares with nobody; the others take turns."""
    cluster = cluster_of({"x": Kind(4, 10, "NVIDIA H200")})
    for name, need in (("a", 9), ("b", 3), ("c", 3)):
        deploy(cluster, name, Asked(2, need, 2))
    cluster.settle()
    views = cluster.core.explain_job("j", cluster.now)["deployments"]
    assert all(each["group"] is not None for each in views)
    with pytest.raises(CapacityError, match="too few of them can take turns") as refused:
        deploy(cluster, "d", Asked(2, 9, 2))
    assert refused.value.details == {"workers": 8, "gpus": 4}


@pytest.mark.parametrize("is_rollout", [True, False])
def test_a_job_may_have_more_deployments_than_python_has_stack_frames(is_rollout: bool) -> None:
    cluster = cluster_of({"x": Kind(1, 10, "NVIDIA H200")}, residents_max=2)
    deploy(cluster, "a", Asked(1, 5, 0, is_rollout))
    state = cluster.core._context.state
    found = [copy(state.deployment(DeploymentId("j/a"))) for _ in range(1200)]
    for index, each in enumerate(found):
        each.deployment = DeploymentId(f"j/a{index}")
    (kind,) = cluster.core._context.cluster.capacity.inventory.sizes()
    least = 1200 if is_rollout else 600
    for gpus, fit in ((least, True), (least - 1, False)):
        needs = least_needs(cluster.core.settings, found)
        assert fits({kind: gpus}, needs) == fit
        if fit:
            assert fit_in_groups(cluster.core.settings, {kind: gpus}, found)


asked = st.builds(
    Asked,
    st.integers(1, 2),
    st.integers(3, 10),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from((False, False, True)),
    st.sampled_from(("", "", "x", "y")),
)
kinds = st.fixed_dictionaries(
    {
        "x": st.builds(Kind, st.integers(1, 4), st.just(10), st.sampled_from(("", "NVIDIA H200"))),
        "y": st.builds(Kind, st.integers(1, 3), st.sampled_from((6, 10)), st.just("NVIDIA A10")),
    }
)


@settings(max_examples=examples(40), deadline=None)
@given(kinds, st.lists(asked, min_size=1, max_size=5), st.integers(1, 3))
def test_a_job_is_refused_only_if_no_division_into_groups_fits(
    kinds: dict[str, Kind], wanted: list[Asked], members_max: int
) -> None:
    cluster = cluster_of(kinds, residents_max=members_max)
    accepted: list[Asked] = []
    for index, each in enumerate(wanted):
        possible = any(
            held(kinds, groups) and all(may_share(group, members_max) for group in groups)
            for groups in partitions([*accepted, each])
        )
        try:
            deploy(cluster, f"d{index}", each)
        except (CapacityError, ModelDoesNotFitError):
            assert not possible
        else:
            assert possible
            accepted.append(each)


def partitions(items: list[Asked]) -> Iterator[list[list[Asked]]]:
    """All divisions of the items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for at in range(len(rest)):
            yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]


def may_share(group: list[Asked], members_max: int) -> bool:
    return len(group) == 1 or (
        len(group) <= members_max
        and len({each.workers for each in group}) == 1
        and sum(each.is_rollout for each in group) <= 1
        and not any(each.exclusive for each in group)
    )


def held(kinds: dict[str, Kind], groups: list[list[Asked]]) -> bool:
    """Whether some choice of a node for each group has the GPUs and the memory."""
    if not groups:
        return True
    group, rest = groups[0], groups[1:]
    for name, kind in kinds.items():
        left = kind.gpus - group[0].workers
        typed = all(each.node_type in ("", name) for each in group)
        if left < 0 or not typed or not has_memory(kind, group):
            continue
        if held({**kinds, name: kind._replace(gpus=left)}, rest):
            return True
    return False


def has_memory(kind: Kind, group: list[Asked]) -> bool:
    if not kind.gpu_kind:
        return all(each.need - each.kept <= kind.memory for each in group)
    kept = sum(each.kept for each in group)
    return all(each.need + kept - each.kept <= kind.memory for each in group)
