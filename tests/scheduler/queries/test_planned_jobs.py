"""The plan of a cluster, from which a quote is simulated."""

import msgspec
import pytest

from plexrl.errors import InvalidRequestError, QuotaExceededError, UnknownJobError
from plexrl.ids import DeploymentId, JobId, TenantId
from plexrl.scheduler.jobs.quoted_jobs import quoted_jobs
from plexrl.scheduler.queries.overview.planned_jobs import (
    JOBS_PER_STEP,
    ClusterPlan,
    LiveJobsReader,
    cluster_plan,
    live_jobs,
)
from plexrl.scheduler.state.demand.job_quote import JobQuote
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import AskedRow, ReadPlan
from tests.scheduler.fake_cluster import FakeCluster

T = TenantId("t")
TRACE = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=20.0),))
QUOTE = JobQuote(
    start_s=0.0,
    start_low_s=0.0,
    start_high_s=10.0,
    end_s=100.0,
    end_low_s=50.0,
    end_high_s=200.0,
    gpu_hours=1.0,
)


def plan_of(cluster: FakeCluster, call: ReadPlan, tenant: TenantId = T) -> ClusterPlan:
    return cluster_plan(cluster.core.cluster, tenant, call, cluster.now)


def training(**fields: object) -> ev.DeploymentCreated:
    given = {"workers": 2, "state_bytes": 1000, "exclusive": False, "spec_json": "{}", **fields}
    name = {"deployment": "asked/actor", "job": "asked", "kind": "train"}
    return msgspec.convert({**name, **given}, ev.DeploymentCreated)


def one_job() -> FakeCluster:
    """Job `a` of tenant t, on two of four GPUs, with a declared demand and length."""
    cluster = FakeCluster()
    cluster.start_node(4)
    cluster.job("a", expected_s=1000.0)
    cluster.deploy("a/actor", trace=TRACE)
    cluster.settle()
    return cluster


def test_a_plan_has_the_live_jobs_and_changes_nothing() -> None:
    cluster = one_job()
    before = cluster.core.dump()
    plan = plan_of(cluster, ReadPlan(name="new", steps=7, deployments=(training(trace=TRACE),)))
    assert cluster.core.dump() == before
    [live] = plan.jobs
    assert (live.job, live.has_gpus, live.gpus, live.period_s) == ("a", True, 2, 100.0)
    assert live.left_s == pytest.approx(1000.0)
    assert (plan.asked.gpus, plan.asked.left_s, plan.asked.knowledge) == (2, 700.0, "declared")
    assert [(node.nodes, node.gpus) for node in plan.nodes] == [(1, 4)]


def test_a_plan_survives_the_way_to_the_child() -> None:
    plan = plan_of(one_job(), ReadPlan(name="new", steps=7, deployments=(training(trace=TRACE),)))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=ClusterPlan) == plan


def test_a_plan_holds_no_keys_and_no_specifications() -> None:
    cluster = FakeCluster()
    cluster.start_node(4)
    cluster.send(ev.TenantCreated(tenant=T, key_digest="digest"))
    cluster.job("a")
    cluster.send(training(deployment="a/actor", job="a", spec_json='{"secret": "path"}'))
    cluster.settle()
    text = msgspec.json.encode(
        plan_of(cluster, ReadPlan(name="b", row=AskedRow(gpus=1), expected_s=9.0))
    )
    assert b'"tenant":"t"' in text
    assert not any(each in text for each in (b"digest", b"secret"))


def test_a_job_like_another_has_its_demand() -> None:
    asked = plan_of(one_job(), ReadPlan(name="new", like=JobId("a"), steps=3)).asked
    assert (asked.period_s, asked.left_s, asked.gpus, asked.has_gpus) == (100.0, 300.0, 2, False)
    with pytest.raises(UnknownJobError):
        plan_of(one_job(), ReadPlan(name="new", like=JobId("nobody"), steps=3))


def test_a_job_of_unknown_demand_and_length_is_refused_with_what_to_say() -> None:
    cluster = one_job()
    with pytest.raises(InvalidRequestError, match="expected_s"):
        plan_of(cluster, ReadPlan(name="new", steps=3, deployments=(training(),)))
    with pytest.raises(InvalidRequestError, match="no deployment"):
        plan_of(cluster, ReadPlan(name="new", steps=3))
    known = plan_of(cluster, ReadPlan(name="new", expected_s=50.0, deployments=(training(),)))
    assert (known.asked.left_s, known.asked.period_s, known.asked.knowledge) == (
        50.0,
        None,
        "unknown",
    )


def test_a_tenants_limits_hold_for_quotes_too() -> None:
    cluster = one_job()
    settings = {"weight": 1.0, "jobs_max": None, "gpus_max": None, "gpu_seconds_max": None}
    cluster.send(ev.TenantCreated(tenant=TenantId("u"), key_digest="u"))
    cluster.send(ev.TenantConfigured(tenant=TenantId("u"), live_jobs_max=0, **settings))
    with pytest.raises(QuotaExceededError):
        plan_of(cluster, ReadPlan(name="b", row=AskedRow(gpus=1), expected_s=9.0), TenantId("u"))


def test_references_count_with_the_rollout() -> None:
    cluster = one_job()
    others = (
        training(deployment="asked/rollout", kind="rollout", workers=1, exclusive=True),
        training(deployment="asked/reference", kind="forward", workers=1),
    )
    call = ReadPlan(name="new", steps=2, deployments=(*others, training(trace=TRACE)))
    asked = plan_of(cluster, call).asked
    assert (asked.gpus, asked.rollout_gpus, asked.rollouts) == (2, 2, "own")


def test_a_completed_job_leaves_the_errors_of_its_quote_to_the_next() -> None:
    cluster = FakeCluster()
    cluster.start_node(4)
    cluster.send(ev.TenantCreated(tenant=T, key_digest="digest"))
    cluster.job("a", quote=QUOTE)
    cluster.deploy("a/actor", trace=TRACE)
    cluster.settle()
    cluster.pass_time(150.0)
    took_s = cluster.now - cluster.core.cluster.state.jobs[JobId("a")].submitted_at
    cluster.send(ev.JobFinished(job=JobId("a"), outcome="completed"))
    plan = plan_of(cluster, ReadPlan(name="b", row=AskedRow(gpus=1), expected_s=9.0))
    assert plan.end_errors == pytest.approx(((took_s - 100.0) / 100.0,))
    assert len(plan.start_errors) == 1
    [view] = quoted_jobs(cluster.core.cluster.state, T)
    assert (view["quoted_end_s"], view["end_s"], view["state"]) == (100.0, took_s, "COMPLETED")
    assert quoted_jobs(cluster.core.cluster.state, TenantId("u")) == []


def test_a_cancelled_job_says_nothing_about_quotes() -> None:
    cluster = FakeCluster()
    cluster.start_node(4)
    cluster.send(ev.TenantCreated(tenant=T, key_digest="digest"))
    cluster.job("a", quote=QUOTE)
    cluster.deploy("a/actor", trace=TRACE)
    cluster.settle()
    cluster.send(ev.JobFinished(job=JobId("a"), outcome="cancelled"))
    plan = plan_of(cluster, ReadPlan(name="b", row=AskedRow(gpus=1), expected_s=9.0))
    assert plan.end_errors == ()


def test_a_quote_survives_snapshot_and_restart() -> None:
    cluster = FakeCluster()
    cluster.start_node(4)
    cluster.job("a", quote=QUOTE)
    cluster.deploy("a/actor")
    cluster.restart_scheduler(restored=True)
    assert cluster.core.cluster.state.jobs[JobId("a")].quote == QUOTE
    assert cluster.core.cluster.state.deployments[DeploymentId("a/actor")].spec.workers == 2


def test_a_job_that_uses_idle_time_alone_refuses_no_other_tenants_quote() -> None:
    cluster = one_job()
    cluster.deploy("a/eval", "rollout", 1, preemptible=True)
    cluster.end("a/actor")
    assert cluster.core.cluster.state.job(JobId("a")).deployments == ["a/eval"]
    call = ReadPlan(name="new", steps=7, deployments=(training(trace=TRACE),))
    assert plan_of(cluster, call, TenantId("u")).jobs == ()


def test_live_jobs_are_read_in_short_steps_between_which_they_may_end() -> None:
    cluster = FakeCluster(policy="isolated")
    cluster.start_node(4)
    for number in range(JOBS_PER_STEP + 2):
        cluster.job(f"j{number}")
        cluster.deploy(f"j{number}/actor", workers=1)
    reader = LiveJobsReader(cluster.core.cluster.state)
    steps = reader.steps(lambda: cluster.core.cluster.state, cluster.now)
    next(steps)
    cluster.send(ev.JobFinished(job=f"j{JOBS_PER_STEP}", outcome="cancelled"))
    assert list(steps) == [None]
    assert len(reader.jobs) == JOBS_PER_STEP + 1
    assert [job.job for job in live_jobs(cluster.core.cluster.state, cluster.now)] == [
        job.job for job in reader.jobs
    ]
