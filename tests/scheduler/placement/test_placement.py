"""Where a deployment comes to lie: the policies' ways, shifts, memory, types, and no memory of the
past in any choice."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from plexrl import errors
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.policies import (
    POLICIES,
    WAITING_MODES,
    PlacementMode,
    attempts,
)
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages.views import PlacementView
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

HORIZON = 1200


def trace(busy_s: float, period_s: float = 100.0, offset_s: float = 0.0) -> DemandTrace:
    return DemandTrace(period_s=period_s, segments=(Segment(offset_s=offset_s, duration_s=busy_s),))


def cluster_of(gpus: int, policy: str, **changes: object) -> FakeCluster:
    cluster = FakeCluster(policy=policy, horizon_slots=HORIZON, **changes)
    cluster.now = 1200.0
    cluster.start_node(gpus)
    return cluster


def submit(cluster: FakeCluster, job: str, demand: DemandTrace | None, workers: int = 2) -> None:
    cluster.job(job)
    cluster.deploy(f"{job}/actor", workers=workers, trace=demand)


def group_of(cluster: FakeCluster, job: str) -> object:
    return cluster.core.job_view(job, cluster.now)["deployments"][0]["group"]


def placement(cluster: FakeCluster, job: str) -> PlacementView:
    record = cluster.core.explain_job(job, cluster.now)["deployments"][0]["placement"]
    assert record is not None, f"{job} has no GPUs"
    return record


def profiled(cluster: FakeCluster, job: str, cycles: int = 5) -> None:
    """Enough cycles for a profile, without waiting."""
    for index in range(cycles):
        cluster.submit(f"{job}:{index}:{cluster.now}", f"{job}/actor", "optim_step")
        while cluster.runs:
            cluster.pass_time(1.0)
            cluster.execute(cluster.runs[0])
        cluster.pass_time(9.0)


def test_isolated_gives_each_deployment_its_own_gpus() -> None:
    cluster = cluster_of(4, "isolated")
    for job in ("a", "b", "c"):
        submit(cluster, job, trace(10.0))
    assert [group_of(cluster, job) for job in ("a", "b", "c")] == ["g1", "g2", None]


def test_pack_fills_one_group_before_it_makes_another() -> None:
    cluster = cluster_of(4, "pack", residents_max=2)
    for job in ("a", "b", "c", "d", "e"):
        submit(cluster, job, None)
    assert [group_of(cluster, job) for job in "abcde"] == ["g1", "g1", "g2", "g2", None]


def test_pack_takes_the_fullest_group() -> None:
    cluster = cluster_of(8, "pack", residents_max=2)
    for job in "abcd":
        submit(cluster, job, None)
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    submit(cluster, "e", None, workers=4)
    for job in "cd":
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
    submit(cluster, "f", None)
    assert group_of(cluster, "f") == "g1"


def test_spread_finds_the_shift_at_which_the_demand_fits() -> None:
    cluster = cluster_of(2, "spread", load_max=1.0)
    submit(cluster, "a", trace(60.0))
    submit(cluster, "b", trace(30.0))
    assert group_of(cluster, "a") == group_of(cluster, "b")
    record = placement(cluster, "b")
    assert (record["way"], record["shift_s"], record["overlap_s"]) == ("strict", 60.0, 0.0)
    submit(cluster, "c", trace(10.0))
    assert (placement(cluster, "c")["way"], placement(cluster, "c")["shift_s"]) == ("strict", 90.0)


def test_a_trace_longer_than_its_slots_by_a_rounding_error_is_reserved() -> None:
    cluster = FakeCluster(policy="spread+backfill", horizon_slots=600, load_max=1.0)
    cluster.start_node(2)
    cluster.now = 0.0
    submit(cluster, "a", trace(20.0, 30.0))
    cluster.pass_time(3.0)
    submit(cluster, "b", trace(10.000000000000002, 30.0))
    assert group_of(cluster, "a") == group_of(cluster, "b") == "g1"


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(0, HORIZON),
    st.lists(
        st.tuples(
            st.sampled_from((20.0, 30.0, 60.0, 61.3, 7.0)),
            st.sampled_from((0.1, 0.25, 1 / 3, 0.5, 2 / 3)),
            st.sampled_from((0.0, 0.1, 0.3)),
            st.sampled_from((0.0, 1e-15, -1e-15, 1e-9, 1e-6, 0.3)),
            st.sampled_from((0.0, 1.0, 2.7)),
        ),
        min_size=2,
        max_size=5,
    ),
)
def test_every_fit_can_be_reserved(
    now: int, demands: list[tuple[float, float, float, float, float]]
) -> None:
    cluster = cluster_of(2, "spread+backfill", load_max=2.0, waiting_part_max=1.0)
    cluster.now += now
    for index, (period_s, part, offset, error_s, pause_s) in enumerate(demands):
        busy_s = min(period_s * part + error_s, period_s * (1.0 - offset))
        submit(cluster, f"j{index}", trace(busy_s, period_s, period_s * offset))
        cluster.pass_time(pause_s)


@pytest.mark.parametrize("residents_max", [2, 3, 6, 7, 9, 11, 13])
def test_a_group_holds_as_many_members_without_a_profile_as_it_may(residents_max: int) -> None:
    cluster = cluster_of(2, "pack", load_max=0.9, residents_max=residents_max)
    for index in range(residents_max + 1):
        submit(cluster, f"j{index}", None)
    placed = [group_of(cluster, f"j{index}") for index in range(residents_max + 1)]
    assert placed == ["g1"] * residents_max + [None]


@pytest.mark.parametrize("policy", ["spread", "spread+backfill"])
def test_declared_demand_shares_at_once_though_no_move_was_measured(policy: str) -> None:
    cluster = FakeCluster(policy=policy)
    large = {"gpu_memory_bytes": 80 << 30, "host_memory_bytes": 2048 << 30}
    cluster.nodes["n"] = ev.NodeJoined(node="n", gpus=8, statemanager="sm:n", **large)
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=8, state_bytes=100 << 30, trace=trace(40.0))
        cluster.settle()
    assert group_of(cluster, "b") == group_of(cluster, "a") == "g1"


def test_a_state_too_large_for_the_fastest_link_does_not_share() -> None:
    cluster = FakeCluster(policy="spread")
    large = {"gpu_memory_bytes": 80 << 30, "host_memory_bytes": 2048 << 30}
    cluster.nodes["n"] = ev.NodeJoined(node="n", gpus=1, statemanager="sm:n", **large)
    cluster.start_node()
    for job in ("a", "b"):
        cluster.job(job)
        demand = trace(1.6, period_s=4.0)
        cluster.deploy(f"{job}/actor", workers=1, state_bytes=79 << 30, trace=demand)
        cluster.settle()
    assert (group_of(cluster, "a"), group_of(cluster, "b")) == ("g1", None)


def test_a_later_start_needs_a_smaller_shift() -> None:
    cluster = cluster_of(2, "spread")
    submit(cluster, "a", trace(60.0))
    cluster.pass_time(25.0)
    submit(cluster, "b", trace(30.0))
    assert placement(cluster, "b")["shift_s"] == 35.0


def test_spread_makes_a_new_group_before_it_overlaps() -> None:
    cluster = cluster_of(4, "spread")
    for job in ("a", "b", "c"):
        submit(cluster, job, trace(60.0))
    assert group_of(cluster, "a") != group_of(cluster, "b")
    assert group_of(cluster, "c") is None, "its load would be above load_max"


@pytest.mark.parametrize(
    ("quota", "gang", "way"),
    [(None, 0, "overlap"), (4, 0, "dedicated"), (None, 2, "dedicated")],
    ids=["may have GPUs", "held by its quota", "half a gang"],
)
def test_if_gpus_are_scarce_an_overlap_comes_before_a_new_group(
    quota: int | None, gang: int, way: str
) -> None:
    cluster = cluster_of(8, "spread+backfill", load_max=2.0, waiting_part_max=1.0)
    submit(cluster, "a", trace(60.0))
    cluster.send(ev.TenantCreated(tenant="other", key_digest="k"))
    cluster.job("large", tenant="other", gang=gang)
    cluster.deploy("large/actor", workers=7)
    limits = {"jobs_max": None, "gpus_max": quota, "gpu_seconds_max": None}
    cluster.send(ev.TenantConfigured(tenant="other", weight=1.0, **limits))
    submit(cluster, "b", trace(60.0))
    assert placement(cluster, "b")["way"] == way


@pytest.mark.parametrize(("overlap_max", "way"), [(0.2, None), (0.3, "overlap")])
def test_overlap_is_accepted_up_to_its_bound(overlap_max: float, way: str | None) -> None:
    """At best 15 s of 60 s overlap another plan: two gaps of 35 s are free."""
    cluster = cluster_of(2, "spread", overlap_max=overlap_max, load_max=2.0, waiting_part_max=1.0)
    two = DemandTrace(
        period_s=100.0,
        segments=(
            Segment(offset_s=0.0, duration_s=15.0),
            Segment(offset_s=50.0, duration_s=15.0),
        ),
    )
    submit(cluster, "a", two)
    submit(cluster, "b", trace(60.0))
    if way is None:
        assert group_of(cluster, "b") is None
    else:
        record = placement(cluster, "b")
        assert (record["way"], record["overlap_s"]) == (way, 15.0)


def test_a_group_within_the_overlap_bound_is_found_behind_a_cheaper_one_beyond_it() -> None:
    """Overlapping segments with slack is cheap, but here exceeds the overlap bound."""
    cluster = cluster_of(4, "spread", overlap_max=0.22, load_max=2.0)
    slack = DemandTrace(
        period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=80.0, slack_s=80.0),)
    )
    submit(cluster, "a", slack)
    submit(cluster, "b", trace(68.0))
    submit(cluster, "c", trace(40.0))
    record = placement(cluster, "c")
    assert (record["group"], record["overlap_s"]) == ("g2", 8.0)


def test_a_cold_job_gets_its_own_group_that_is_closed_until_it_is_profiled() -> None:
    cluster = cluster_of(2, "spread", profile_cycles=2)
    submit(cluster, "a", None)
    cluster.settle()
    submit(cluster, "b", trace(0.5, 100.0))
    cluster.pass_time(500.0)
    assert group_of(cluster, "b") is None
    profiled(cluster, "a")
    assert group_of(cluster, "b") == group_of(cluster, "a")


@pytest.mark.parametrize("now", [1200.0, 1200.1, 1234.56789, 1e9 + 0.1])
def test_a_cold_job_shares_when_its_patience_is_over(now: float) -> None:
    cluster = cluster_of(2, "spread", cold_start_patience_s=60.1)
    cluster.now = now
    submit(cluster, "a", trace(30.0))
    submit(cluster, "b", None)
    cluster.pass_time(60.0)
    assert group_of(cluster, "b") is None
    cluster.pass_time(0.2)
    assert placement(cluster, "b")["way"] == "emptiest"


def test_a_cold_job_needs_its_share_of_the_load_to_be_free() -> None:
    cluster = cluster_of(2, "spread", cold_start_patience_s=0.0)
    submit(cluster, "a", trace(9.0, 10.0))
    submit(cluster, "b", None)
    assert group_of(cluster, "b") is None


def test_a_group_takes_no_more_members_than_it_may_however_short_their_segments() -> None:
    cluster = cluster_of(2, "spread", residents_max=2)
    for job in "abc":
        submit(cluster, job, trace(1.0))
    assert [group_of(cluster, job) for job in "abc"] == ["g1", "g1", None]


def node(name: str, **fields: int | str) -> ev.NodeJoined:
    sizes: dict[str, int | str] = {
        "gpus": 4,
        "gpu_memory_bytes": 1 << 30,
        "host_memory_bytes": 2500,
    }
    return ev.NodeJoined(node=name, statemanager=f"sm:{name}", **{**sizes, **fields})


@pytest.mark.parametrize(("nvme_bytes", "count"), [(0, 2), (500, 3), (1000, 3), (10_000, 5)])
def test_states_of_all_groups_of_a_node_fit_its_host_memory_and_nvme(
    nvme_bytes: int, count: int
) -> None:
    """Each state has 1000 bytes; two groups of different sizes take all GPUs of the node."""
    cluster = FakeCluster(policy="pack")
    cluster.send(node("n", nvme_bytes=nvme_bytes))
    placed = 0
    for index in range(5):
        submit(cluster, f"j{index}", None, workers=1 + 2 * (index % 2))
        cluster.core.check_invariants()
        placed += group_of(cluster, f"j{index}") is not None
    assert placed == count


@pytest.mark.parametrize(("host_gb", "group"), [(80, "g1"), (50, "g2")])
def test_a_later_shift_is_preferred_to_a_spill_that_takes_longer(host_gb: int, group: str) -> None:
    """On `g1` the demand fits at once, on `g2` after 20 s. Each state has 40 GB, and a spill to
    NVMe takes one second for each GB that the host memory of `g1` lacks."""
    gb = 10**9
    cluster = FakeCluster(policy="spread", horizon_slots=HORIZON, load_max=1.0)
    cluster.now = float(HORIZON)
    sizes = {"gpus": 2, "gpu_memory_bytes": 80 * gb, "nvme_bytes": 10**13}
    for name, host_bytes, demand in (
        ("a", host_gb * gb, trace(82.0, offset_s=15.0)),
        ("b", 1000 * gb, trace(20.0)),
    ):
        cluster.send(node(name, host_memory_bytes=host_bytes, **sizes))
        cluster.job(name)
        cluster.deploy(f"{name}/actor", trace=demand, state_bytes=40 * gb)
    assert [group_of(cluster, job) for job in "ab"] == ["g1", "g2"]
    cluster.job("c")
    cluster.deploy("c/actor", trace=trace(10.0), state_bytes=40 * gb)
    assert group_of(cluster, "c") == group
    assert placement(cluster, "c")["shift_s"] == {"g1": 0.0, "g2": 20.0}[group]


def test_a_group_has_the_requested_type_and_size() -> None:
    cluster = FakeCluster(policy="pack")
    cluster.send(node("x", node_type="x", host_memory_bytes=10**6))
    cluster.send(node("y", node_type="y", host_memory_bytes=10**6))
    for job, node_type, workers in (("a", "y", 2), ("b", "x", 2), ("c", "y", 2), ("d", "y", 1)):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", node_type=node_type, workers=workers)
    assert group_of(cluster, "a") == group_of(cluster, "c")
    assert len({group_of(cluster, job) for job in "abd"}) == 3
    for job, node_type in (("a", "y"), ("b", "x"), ("d", "y")):
        ranks = cluster.core.job_view(job, cluster.now)["deployments"][0]["ranks"]
        assert {rank["node"] for rank in ranks} == {node_type}
    cluster.job("e")
    with pytest.raises(errors.CapacityError, match="of type 'z'"):
        cluster.deploy("e/actor", node_type="z")


demands = st.builds(
    trace,
    busy_s=st.sampled_from((5.0, 20.0, 45.0, 70.0)),
    period_s=st.sampled_from((100.0, 120.0, 150.0)),
    offset_s=st.sampled_from((0.0, 13.0, 30.0)),
)
wishes = st.lists(
    st.one_of(
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.sampled_from((1, 2, 4)), st.one_of(st.none(), demands), st.floats(0.0, 90.0)),
    ),
    min_size=4,
    max_size=25,
)


@settings(
    max_examples=examples(60), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(
    st.sampled_from(("pack", "spread", "spread+backfill", "co-execution")),
    wishes,
    st.integers(0, 25),
)
def test_a_restored_scheduler_chooses_as_the_original(
    policy: str, history: list[tuple[object, ...]], at: int
) -> None:
    cluster = cluster_of(8, policy, load_max=1.5)
    other: SchedulerCore | None = None
    for index, step in enumerate(history):
        if index == at:
            other = SchedulerCore.restore(cluster.config, cluster.core.dump())
        before = len(cluster.journal)
        if step[0] == "end":
            live = [j["job"] for j in cluster.core.list_jobs(None, 0.0) if not j["ended_at"]]
            if live:
                assert isinstance(step[1], int)
                job = live[step[1] % len(live)]
                cluster.send(ev.JobFinished(job=job, outcome="completed"))
        else:
            workers, demand, pause_s = step
            assert isinstance(workers, int)
            assert isinstance(pause_s, float)
            assert demand is None or isinstance(demand, DemandTrace)
            submit(cluster, f"j{index}", demand, workers)
            cluster.pass_time(pause_s)
        if other is not None:
            for event, now in cluster.journal[before:]:
                other.handle(event, now)
            assert other.list_groups(cluster.now) == cluster.core.list_groups(cluster.now)
            assert other.dump() == cluster.core.dump()


@pytest.mark.parametrize("policy", ["pack", "spread", "spread+backfill"])
@pytest.mark.parametrize("gang", [0, 3])
@pytest.mark.parametrize(
    "trace",
    [None, DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=44.0),))],
)
def test_deployments_of_one_job_leave_gpus_for_its_others(
    policy: str, gang: int, trace: DemandTrace | None
) -> None:
    """With a group of its own for each, the rollout would wait for ever."""
    cluster = FakeCluster(policy=policy)
    cluster.start_node(4)
    cluster.job("a", gang=gang)
    cluster.deploy("a/actor", workers=2, trace=trace)
    cluster.deploy("a/reference", "forward", workers=2, trace=trace)
    cluster.deploy("a/rollout", "rollout", workers=1)
    found = cluster.core.explain_job("a", cluster.now)["deployments"]
    groups = {str(each["deployment"]): each["group"] for each in found}
    assert None not in groups.values()
    assert groups["a/actor"] == groups["a/reference"] != groups["a/rollout"]


def mixed(policy: str, **speeds: float) -> FakeCluster:
    """A cluster with a node of two GPUs of each type; the first has the least memory."""
    cluster = FakeCluster(policy=policy, horizon_slots=HORIZON)
    cluster.now = 1200.0
    for place, (name, speed) in enumerate(speeds.items()):
        cluster.join_node(2, f"n{place}", node_type=name, speed=speed)
        known = cluster.nodes[f"n{place}"]
        cluster.nodes[f"n{place}"] = replace(known, gpu_memory_bytes=(place + 1) << 30)
        cluster.join_node(2, f"n{place}")
    cluster.join_router()
    return cluster


def type_of(cluster: FakeCluster, job: str) -> str:
    group = group_of(cluster, job)
    groups = cluster.core.list_groups(cluster.now)
    return next((each["node_type"] for each in groups if each["group"] == group), "")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_takes_the_faster_of_two_idle_node_types(policy: str) -> None:
    cluster = mixed(policy, a100=0.0, b200=0.0)
    submit(cluster, "first", trace(10.0))
    assert type_of(cluster, "first") == "b200"
    # Its agent's figure is worth more than the name.
    cluster = mixed(policy, a100=3.0, b200=1.0)
    submit(cluster, "first", trace(10.0))
    assert type_of(cluster, "first") == "a100"


def test_a_job_that_finds_the_fast_nodes_taken_runs_on_slower_ones() -> None:
    cluster = mixed("isolated", slow=1.0, fast=2.0)
    for job in ("first", "second", "third"):
        submit(cluster, job, trace(10.0))
    assert [type_of(cluster, job) for job in ("first", "second", "third")] == ["fast", "slow", ""]


def test_a_job_that_asks_for_a_type_or_memory_gets_it_whatever_its_speed() -> None:
    cluster = mixed("isolated", fast=2.0, slow=1.0)
    cluster.job("large")
    cluster.deploy("large/actor", workers=2, trace=trace(10.0), state_bytes=3 << 30, exclusive=True)
    assert type_of(cluster, "large") == "slow"
    cluster = mixed("isolated", slow=1.0, fast=2.0)
    cluster.job("typed")
    cluster.deploy("typed/actor", workers=2, trace=trace(10.0), node_type="slow")
    assert type_of(cluster, "typed") == "slow"


def test_a_job_joins_no_group_on_slow_nodes_while_it_need_not_wait_on_fast_ones() -> None:
    cluster = mixed("spread+backfill", slow=1.0, fast=2.0)
    cluster.job("typed")
    cluster.deploy("typed/actor", workers=2, trace=trace(10.0), node_type="slow")
    submit(cluster, "first", trace(60.0))
    # It would fit into the gaps of either: now those of the fast nodes.
    submit(cluster, "second", trace(10.0))
    assert [type_of(cluster, job) for job in ("first", "second")] == ["fast", "fast"]
    # Here it would have to wait for others, and on the slow nodes it need not.
    submit(cluster, "third", trace(50.0))
    assert type_of(cluster, "third") == "slow"


def test_a_rollout_leaves_the_fast_nodes_to_training() -> None:
    cluster = mixed("isolated", slow=1.0, fast=2.0)
    cluster.job("first")
    cluster.deploy("first/actor", workers=2, kind="rollout")
    assert type_of(cluster, "first") == "slow"


@given(
    modes=st.lists(st.sampled_from(PlacementMode), unique=True).map(tuple),
    speeds=st.lists(st.floats(0.1, 10.0), unique=True).map(lambda found: sorted(found)[::-1]),
)
def test_every_mode_is_tried_on_all_nodes_once_and_faster_ones_first(
    modes: tuple[PlacementMode, ...], speeds: list[float]
) -> None:
    found = attempts(modes, speeds)
    for mode in modes:
        tried = [speed for each, speed in found if each == mode]
        assert tried == [*speeds[:-1], None]
    for speed in {speed for _, speed in found}:
        assert tuple(mode for mode, at in found if at == speed) == modes
    if len(speeds) < 2:
        assert found == [(mode, None) for mode in modes]
    for index, (mode, _) in enumerate(found):
        if mode in WAITING_MODES:
            ahead = modes[: modes.index(mode)]
            assert {each for each, _ in found[index:]}.isdisjoint(ahead)
