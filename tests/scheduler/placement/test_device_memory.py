"""What shares a real GPU: one member's whole need, and what all others keep there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import ModelDoesNotFitError
from plexrl.model.memory.device_memory import DeviceMemory, MemoryTerm
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.wire.messages.views import PlacedDeploymentView
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

GIB = 1 << 30
H200 = "NVIDIA H200"


def memory(need_gib: float, kept_gib: float = 1.0) -> DeviceMemory:
    """A need with activations of 1 GiB."""
    rest = round((need_gib - kept_gib - 1.0) * GIB)
    return DeviceMemory(
        terms=(
            MemoryTerm(name="weights", nbytes=rest),
            MemoryTerm(name="activations", nbytes=GIB, is_allocated=True),
            MemoryTerm(name="CUDA context", nbytes=round(kept_gib * GIB), stays=True),
        )
    )


def cluster_of(gpus: int = 2, gpu_kind: str = H200, **changes: object) -> FakeCluster:
    cluster = FakeCluster(**{"policy": "pack", "profile_cycles": 1, **changes})
    sizes = {"host_memory_bytes": 1000 * GIB, "gpu_memory_bytes": 10 * GIB}
    cluster.join_node(gpus, gpu_kind=gpu_kind)
    cluster.nodes["n"] = type(cluster.nodes["n"])(
        node="n", gpus=gpus, statemanager="sm:n", gpu_kind=gpu_kind, **sizes
    )
    cluster.start_node(gpus)
    return cluster


def submit(cluster: FakeCluster, job: str, need: DeviceMemory | None, workers: int = 2) -> None:
    cluster.job(job)
    cluster.deploy(f"{job}/actor", workers=workers, memory=need)
    cluster.settle()


def explained(cluster: FakeCluster, job: str) -> PlacedDeploymentView:
    return cluster.core.explain_job(job, cluster.now)["deployments"][0]


def group_of(cluster: FakeCluster, job: str) -> object:
    return explained(cluster, job)["group"]


def test_members_share_while_each_fits_beside_what_the_others_keep() -> None:
    cluster = cluster_of()
    for job, need in (("a", 8.0), ("b", 7.0), ("c", 8.0), ("d", 2.0)):
        submit(cluster, job, memory(need))
    # 8 + 1 + 1 = 10; with a fourth, the first would have 7 of its 8.
    assert [group_of(cluster, job) for job in "abcd"] == ["g1", "g1", "g1", None]
    found = explained(cluster, "a")["memory"]
    assert found is not None
    assert (found["need_bytes"], found["others_keep_bytes"]) == (8 * GIB, 2 * GIB)
    assert (found["gpu_memory_bytes"], found["gpu_kind"]) == (10 * GIB, H200)


def test_what_does_not_fit_beside_the_members_waits_and_says_so() -> None:
    cluster = cluster_of()
    submit(cluster, "a", memory(9.5))
    submit(cluster, "b", memory(3.0))
    cluster.submit("b:1", "b/actor", "barrier")
    view = cluster.core.explain_job("b", cluster.now)
    assert [row["rule"] for row in view["operations"]] == ["memory"]
    assert "1 lack memory on their GPUs beside what their members keep there" in view["summary"]
    assert explained(cluster, "b")["attempts"][0].get("device_full") == 1
    cluster.end("a/actor")
    cluster.settle()
    assert group_of(cluster, "b") is not None


def test_what_does_not_fit_beside_the_members_is_placed_elsewhere() -> None:
    cluster = cluster_of(gpus=4)
    submit(cluster, "a", memory(9.5))
    submit(cluster, "b", memory(3.0))
    submit(cluster, "c", memory(2.5))
    assert [group_of(cluster, job) for job in "abc"] == ["g1", "g2", "g2"]


def test_what_fits_no_gpu_alone_is_refused_with_the_sum() -> None:
    cluster = cluster_of()
    cluster.job("a")
    with pytest.raises(ModelDoesNotFitError, match="a larger tp") as refused:
        cluster.deploy("a/actor", memory=memory(10.5))
    text = str(refused.value)
    assert "needs 10.50 GiB on each of its 2 GPUs; a NVIDIA H200 has 10.00 GiB" in text
    for row in ("weights", "activations", "CUDA context", "sum"):
        assert row in text
    assert refused.value.details["terms"] == {
        "weights": round(8.5 * GIB),
        "activations": GIB,
        "CUDA context": GIB,
    }
    cluster.deploy("a/actor", memory=memory(10.0))


@pytest.mark.parametrize(("gpu_kind", "need"), [("", memory(50.0)), (H200, None)])
def test_on_virtual_gpus_and_without_a_sum_only_states_count(
    gpu_kind: str, need: DeviceMemory | None
) -> None:
    cluster = cluster_of(gpu_kind=gpu_kind)
    for job in "ab":
        submit(cluster, job, need)
    assert group_of(cluster, "a") == group_of(cluster, "b") == "g1"


@pytest.mark.parametrize(("peak", "fits"), [(GIB // 2, True), (8 * GIB, False)])
def test_a_measured_peak_replaces_the_estimate_with_the_profile(peak: int, fits: bool) -> None:
    cluster = cluster_of(policy="spread", cold_start_patience_s=0.0)
    submit(cluster, "a", memory(5.0))
    cluster.peak_bytes = peak
    for step in range(5):
        cluster.submit(f"a:{step}", "a/actor", "optim_step")
        while cluster.runs:
            cluster.pass_time(1.0)
            cluster.execute(cluster.runs[0])
        cluster.pass_time(9.0)
    found = explained(cluster, "a")["memory"]
    assert found is not None
    assert found["is_measured"]
    # It ran here, so it is not taken to need more than the GPU has.
    assert found["need_bytes"] == min(4 * GIB + peak, 10 * GIB)
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    assert restored.explain_job("a", cluster.now)["deployments"][0]["memory"] == found
    submit(cluster, "b", memory(5.0))
    assert (group_of(cluster, "b") == "g1") == fits


@given(
    needs=st.lists(
        st.tuples(st.integers(2, 10), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=7
    )
)
@settings(max_examples=examples(40), deadline=None)
def test_no_group_ever_needs_more_than_its_gpus_have(needs: list[tuple[int, float]]) -> None:
    cluster = cluster_of(gpus=6)
    sums = {}
    for index, (need, kept) in enumerate(needs):
        job = f"j{index}"
        sums[job] = memory(float(need), kept)
        submit(cluster, job, sums[job])
    groups: dict[object, list[DeviceMemory]] = {}
    for job, each in sums.items():
        groups.setdefault(group_of(cluster, job), []).append(each)
    groups.pop(None, None)
    for members in groups.values():
        for one in members:
            others = sum(other.kept_bytes for other in members if other is not one)
            assert one.need_bytes + others <= 10 * GIB
