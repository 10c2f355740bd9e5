"""Co-execution groups: each member has its share of the round, and shared states stay in host
memory."""

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.scheduler.placement.contention.co_execution import RoundShare, round_s, total_stretch
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster


def trace(busy_s: float, period_s: float = 100.0, jitter_s: float = 0.0) -> DemandTrace:
    segments = (Segment(offset_s=0.0, duration_s=busy_s),)
    return DemandTrace(period_s=period_s, segments=segments, jitter_s=jitter_s)


def cluster_of(
    nodes: int = 4, host_bytes: int = 1 << 30, nvme_bytes: int = 1 << 40, **changes: object
) -> FakeCluster:
    cluster = FakeCluster(policy="co-execution", ordering="round-robin", **changes)
    for number in range(nodes):
        cluster.send(
            ev.NodeJoined(
                node=f"n{number}",
                gpus=4,
                gpu_memory_bytes=1 << 30,
                host_memory_bytes=host_bytes,
                nvme_bytes=nvme_bytes,
                statemanager=f"sm:{number}",
            )
        )
    cluster.join_router()
    return cluster


def submit(cluster: FakeCluster, job: str, demand: DemandTrace | None, workers: int = 4) -> None:
    cluster.job(job)
    cluster.deploy(f"{job}/actor", workers=workers, trace=demand)


def group_of(cluster: FakeCluster, job: str) -> object:
    return cluster.core.job_view(job, cluster.now)["deployments"][0]["group"]


def groups_of(cluster: FakeCluster, *jobs: str) -> list[object]:
    return [group_of(cluster, job) for job in jobs]


def test_a_group_accepts_members_while_all_shares_fit_into_the_longest_cycle() -> None:
    cluster = cluster_of(load_max=1.0)
    for job in "abcd":
        submit(cluster, job, trace(33.0))
    assert groups_of(cluster, *"abcd") == ["g1", "g1", "g1", "g2"]


def test_a_share_covers_the_worst_case() -> None:
    cluster = cluster_of()
    for job in "abcd":
        submit(cluster, job, trace(33.0, jitter_s=10.0))
    assert groups_of(cluster, *"abcd") == ["g1", "g1", "g2", "g2"]


def test_the_cheapest_group_is_the_one_whose_round_is_as_long_as_the_newcomers_cycle() -> None:
    cluster = cluster_of()
    submit(cluster, "short", trace(60.0, 100.0))
    submit(cluster, "long", trace(60.0, 130.0))
    submit(cluster, "new", trace(30.0, 130.0))
    assert groups_of(cluster, "short", "long", "new") == ["g1", "g2", "g2"]


def test_the_fullest_of_equal_groups_is_chosen() -> None:
    cluster = cluster_of()
    for job, busy_s in (("a", 50.0), ("b", 70.0), ("c", 20.0)):
        submit(cluster, job, trace(busy_s))
    assert groups_of(cluster, "a", "b", "c") == ["g1", "g2", "g2"]


def test_no_member_is_stretched_beyond_its_service_level() -> None:
    """In rounds of 200 s, half of a cycle of 100 s would be waiting."""
    for bound, wanted in ((0.3, "g2"), (0.5, "g1")):
        cluster = cluster_of(waiting_part_max=bound)
        submit(cluster, "short", trace(10.0, 100.0))
        submit(cluster, "long", trace(10.0, 200.0))
        assert group_of(cluster, "long") == wanted


def test_a_job_without_a_profile_does_not_share() -> None:
    cluster = cluster_of()
    submit(cluster, "a", None)
    submit(cluster, "b", trace(1.0))
    submit(cluster, "c", None)
    assert groups_of(cluster, "a", "b", "c") == ["g1", "g2", "g3"]


def test_states_that_share_a_group_stay_in_host_memory_however_much_nvme_there_is() -> None:
    """Each state has 1000 bytes."""
    cluster = cluster_of(nodes=2, host_bytes=2000)
    for job in "abcde":
        submit(cluster, job, trace(5.0))
    assert groups_of(cluster, *"abcde") == ["g1", "g1", "g2", "g2", None]


def test_a_new_group_does_not_evict_a_neighbours_state_from_host_memory() -> None:
    cluster = cluster_of(nodes=2, host_bytes=1500)
    submit(cluster, "a", trace(60.0), workers=2)
    submit(cluster, "b", trace(60.0), workers=2)
    nodes = [
        cluster.core.job_view(job, cluster.now)["deployments"][0]["ranks"][0]["node"]
        for job in "ab"
    ]
    assert nodes == ["n0", "n1"], "beside a on n0 there are GPUs, but no host memory"
    submit(cluster, "c", trace(60.0), workers=2)
    assert group_of(cluster, "c") is None


def test_a_state_larger_than_host_memory_has_its_node_to_itself() -> None:
    cluster = cluster_of(nodes=1, host_bytes=900)
    submit(cluster, "a", trace(5.0), workers=2)
    submit(cluster, "b", trace(5.0), workers=2)
    assert groups_of(cluster, "a", "b") == ["g1", None]


def test_the_explanation_says_that_no_round_fits() -> None:
    cluster = cluster_of(nodes=1)
    submit(cluster, "a", trace(45.0, jitter_s=20.0))
    submit(cluster, "b", trace(45.0, jitter_s=20.0))
    told = cluster.core.explain_job("b", cluster.now)["deployments"][0]
    assert "too little time in their round" in str(told)


@pytest.mark.parametrize(
    ("turns", "wanted"), [([(100, 40), (100, 60)], 100), ([(100, 60), (100, 60)], None)]
)
def test_a_round_is_as_long_as_the_longest_cycle_or_there_is_none(
    turns: list[tuple[float, float]], wanted: float | None
) -> None:
    made = [RoundShare(cycle_s=cycle_s, busy_s=busy_s) for cycle_s, busy_s in turns]
    assert round_s(made) == wanted
    assert total_stretch(made, 150.0) == 1.0


demands = st.builds(
    trace,
    busy_s=st.floats(1.0, 80.0),
    period_s=st.sampled_from((80.0, 100.0, 150.0)),
    jitter_s=st.sampled_from((0.0, 20.0)),
)
steps = st.one_of(
    st.tuples(st.just("end"), st.integers(0, 20)),
    st.tuples(st.sampled_from((1, 2, 4, 8)), st.one_of(demands, demands, st.none())),
)


@settings(
    max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(st.lists(steps, min_size=4, max_size=30), st.integers(500, 4000))
def test_in_any_history_rounds_are_feasible_and_shared_states_fit_host_memory(
    history: list[tuple[object, ...]], host_bytes: int
) -> None:
    """Sums the shares and the memory again from the jobs' demands."""
    cluster = cluster_of(nodes=3, host_bytes=host_bytes)
    asked: dict[str, DemandTrace | None] = {}
    before: dict[str, object] = {}
    for index, step in enumerate(history):
        if step[0] == "end":
            listed = cluster.core.list_jobs(None, 0.0)
            live: list[str] = [j["job"] for j in listed if not j["ended_at"]]
            if live:
                assert isinstance(step[1], int)
                job = live[step[1] % len(live)]
                cluster.send(ev.JobFinished(job=job, outcome="completed"))
                asked.pop(job)
        else:
            workers, demand = step
            assert isinstance(workers, int)
            assert demand is None or isinstance(demand, DemandTrace)
            asked[f"j{index}"] = demand
            submit(cluster, f"j{index}", demand, workers)
        views = {job: cluster.core.job_view(job, cluster.now)["deployments"][0] for job in asked}
        members: dict[object, list[str]] = {}
        bytes_on: dict[object, float] = {}
        for job, view in views.items():
            if view["group"] is None:
                continue
            members.setdefault(view["group"], []).append(job)
            for rank in view["ranks"]:
                node = rank["node"]
                bytes_on[node] = bytes_on.get(node, 0.0) + 1000 / len(view["ranks"])
        for group, jobs in members.items():
            if len(jobs) == 1:
                continue
            nodes = {rank["node"] for rank in views[jobs[0]]["ranks"]}
            assert all(bytes_on[node] < host_bytes + len(asked) for node in nodes)
            if all(before.get(job) == group for job in jobs):
                # Nobody joined; that the longest cycle ended may have left too short a round.
                continue
            traces = [each for each in (asked[job] for job in jobs) if each is not None]
            assert len(traces) == len(jobs), f"{group} shares without a profile"
            busy_s = math.fsum(t.busy_s * (1 + t.jitter_s / t.period_s) for t in traces)
            assert busy_s <= max(t.period_s for t in traces)
        before = {job: view["group"] for job, view in views.items()}
