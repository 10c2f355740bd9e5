"""Each job's own bound of waiting / (waiting + running): admission and relief keep it."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.ids import DeploymentId, JobId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.placement.contention.contention import (
    ContentionConfig,
    Resident,
    predict,
)
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

POLICIES = ("isolated", "pack", "spread", "spread+backfill", "co-execution")


def demand(period_s: float, busy_s: float) -> DemandTrace:
    """One burst in each cycle, of a job that varies too much for a plan."""
    segment = Segment(offset_s=0.0, duration_s=busy_s)
    return DemandTrace(period_s=period_s, segments=(segment,), jitter_s=0.2 * period_s)


def add(
    cluster: FakeCluster, job: str, slo: float | None, trace: DemandTrace | None = None
) -> str | None:
    """Submit a job with one deployment, and return its group."""
    cluster.job(job, slo=slo)
    cluster.deploy(f"{job}/actor", trace=trace)
    return group_of(cluster, job)


def group_of(cluster: FakeCluster, job: str) -> str | None:
    return cluster.core.explain_job(JobId(job), cluster.now)["deployments"][0]["group"]


def set_tenant(cluster: FakeCluster, slo: float | None) -> None:
    cluster.send(ev.TenantCreated(tenant="t", key_digest="d"))
    cluster.send(
        ev.TenantConfigured(
            tenant="t", weight=1.0, jobs_max=None, gpus_max=None, gpu_seconds_max=None, slo=slo
        )
    )


@pytest.mark.parametrize("policy", ["pack", "spread+backfill"])
@pytest.mark.parametrize(("first", "second"), [(None, 0.01), (0.01, None)])
def test_a_group_is_refused_if_either_job_would_wait_more_than_it_accepts(
    policy: str, first: float | None, second: float | None
) -> None:
    """With one pair of GPUs, and with nothing that the cluster's bound objects to."""
    for slos, shared in (((None, None), True), ((first, second), False)):
        cluster = FakeCluster(policy=policy)
        cluster.start_node(2)
        assert add(cluster, "a", slos[0], demand(100.0, 30.0)) is not None
        assert (add(cluster, "b", slos[1], demand(100.0, 30.0)) is not None) is shared


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((60.0, 100.0, 170.0)),
            st.sampled_from((0.1, 0.2, 0.3)),
            st.sampled_from((None, 0.0, 0.02, 0.1, 0.5)),
        ),
        min_size=2,
        max_size=6,
    ),
    st.integers(1, 3),
)
def test_no_member_of_a_group_is_predicted_to_wait_more_than_it_accepts(
    jobs: list[tuple[float, float, float | None]], pairs: int
) -> None:
    cluster = FakeCluster(policy="spread+backfill", waiting_part_max=0.2, load_max=2.0)
    cluster.start_node(2 * pairs)
    accepted, traces = {}, {}
    for number, (period_s, duty, slo) in enumerate(jobs):
        name = f"j{number}/actor"
        traces[name] = demand(period_s, duty * period_s)
        accepted[name] = 0.2 if slo is None else slo
        add(cluster, f"j{number}", slo, traces[name])
    rule = ContentionConfig(guards_slack=True)
    for group in cluster.core.list_groups(cluster.now):
        members = group["members"]
        found = predict([Resident(trace=traces[name]) for name in members], rule)
        for name, waits in zip(members, found.members, strict=True):
            assert waits <= accepted[name]
            assert accepted[name] > 0.0 or len(members) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", [(0.0, None), (None, 0.0)])
def test_a_job_that_accepts_no_waiting_has_a_group_of_its_own(
    policy: str, order: tuple[float | None, float | None]
) -> None:
    cluster = FakeCluster(policy=policy, cold_start_patience_s=0.0)
    cluster.start_node(4)
    groups = {add(cluster, f"j{number}", slo) for number, slo in enumerate(order)}
    assert len(groups) == 2
    assert None not in groups
    assert add(cluster, "late", 0.0) is None


def test_a_job_with_a_tight_bound_joins_no_group_whose_waiting_is_unknown() -> None:
    cluster = FakeCluster(policy="pack")
    cluster.start_node(4)
    assert add(cluster, "a", None) == add(cluster, "b", None)
    tight = add(cluster, "tight", 0.1)
    assert tight not in (None, group_of(cluster, "a"))
    # The others stay away from it too, and a second one waits until GPUs are free.
    assert add(cluster, "c", None) == group_of(cluster, "a")
    assert add(cluster, "second", 0.1) is None
    cluster.submit("o", "second/actor", "barrier")
    view = cluster.core.explain_job(JobId("second"), cluster.now)
    assert view["slo"] == 0.1
    assert [each["rule"] for each in view["operations"]] == ["slo"]
    assert "10% for this one" in view["summary"]
    # It can never share, so a job behind it with the usual bound is not held up.
    cluster.send(ev.JobFinished(job="tight", outcome="completed"))
    assert group_of(cluster, "second") is not None


def test_a_job_has_its_tenants_bound_of_when_it_was_submitted() -> None:
    cluster = FakeCluster(policy="pack")
    cluster.start_node(8)
    set_tenant(cluster, 0.1)
    add(cluster, "a", None)
    add(cluster, "b", 0.4)
    set_tenant(cluster, None)
    add(cluster, "c", None)
    view = cluster.core.job_view
    found = {job: view(JobId(job), cluster.now)["slo"] for job in "abc"}
    assert found == {"a": 0.1, "b": 0.4, "c": 0.3}
    assert cluster.core.list_tenants(cluster.now)[-1]["slo"] is None
    # A restart and a snapshot keep it; a snapshot of before has none.
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    assert {job: restored.job_view(JobId(job), cluster.now)["slo"] for job in "abc"} == found
    plain = msgspec.msgpack.decode(cluster.core.dump())
    for record in (*plain["state"]["jobs"].values(), *plain["state"]["tenants"].values()):
        del record["slo"]
    older = SchedulerCore.restore(cluster.config, msgspec.msgpack.encode(plain))
    assert {older.job_view(JobId(job), cluster.now)["slo"] for job in "abc"} == {0.3}


@pytest.mark.parametrize(("bound", "joins"), [(0.45, False), (0.6, True)])
def test_a_member_waits_for_others_on_all_its_groups(bound: float, joins: bool) -> None:
    """Each of two small jobs makes a large one wait for a third of its time, and both for half."""
    cluster = FakeCluster(
        policy="spread+backfill", load_max=1.0, overlap_max=100.0, waiting_part_max=bound
    )
    cluster.start_node(4)
    for name, workers, busy_s, period_s in (
        ("large", 4, 30.0, 100.0),
        ("one", 2, 150.0, 300.0),
        ("other", 2, 150.0, 300.0),
    ):
        cluster.job(name)
        segment = Segment(offset_s=0.0, duration_s=busy_s)
        trace = DemandTrace(period_s=period_s, segments=(segment,))
        cluster.deploy(f"{name}/actor", workers=workers, trace=trace)
    groups = {
        name: cluster.core.deployment_view(DeploymentId(f"{name}/actor"), cluster.now)["groups"]
        for name in ("large", "one", "other")
    }
    assert len(groups["large"]) == 2
    assert groups["one"]
    assert bool(groups["other"]) == joins


@pytest.mark.parametrize("slo", [-0.1, 1.0, 2.0, math.nan, math.inf])
def test_a_bound_out_of_range_is_refused_and_changes_nothing(slo: float) -> None:
    cluster = FakeCluster()
    cluster.start_node(2)
    with pytest.raises(InvalidRequestError, match="it must be at least 0 and below 1"):
        cluster.job("a", slo=slo)
    with pytest.raises(InvalidRequestError, match="slo is"):
        set_tenant(cluster, slo)
    assert not cluster.core.list_jobs(None, cluster.now)
