"""Jobs are planned by what earlier jobs of any tenant were, until they have been measured."""

import json

import pytest

from plexrl.ids import DeploymentId, JobId, TenantId
from plexrl.scheduler.accounting.earlier_jobs import (
    PROFILES_OF_SHAPE,
    SHAPES_MAX,
    profile_key,
    remember,
    shape_key,
    usual_length,
)
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.rules.config import core_settings
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment, ShapeDemand
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment
from tests.scheduler.fake_cluster import FakeCluster

TRACE = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=10.0),))


def cluster_of(**changes: object) -> FakeCluster:
    return FakeCluster(policy="spread+backfill", cold_start_patience_s=1e6, **changes)


def submit(
    cluster: FakeCluster, job: str, *, tenant: str = "t", spec: str = "{}", **fields: object
) -> Deployment:
    """A job of two GPUs without a declared demand."""
    cluster.job(job, tenant, **fields)
    cluster.send(
        ev.DeploymentCreated(
            deployment=f"{job}/actor",
            job=job,
            kind="train",
            workers=2,
            state_bytes=1000,
            exclusive=False,
            spec_json=spec,
        )
    )
    return deployment_of(cluster, job)


def deployment_of(cluster: FakeCluster, job: str) -> Deployment:
    return cluster.core.cluster.state.deployments[DeploymentId(f"{job}/actor")]


def train(cluster: FakeCluster, job: str, cycles: int, work_s: float = 10.0) -> None:
    """Cycles of 100 s; the submission after the last one ends it."""
    name = job if "/" in job else f"{job}/actor"
    for _ in range(cycles + 1):
        cluster.submit(f"{name}:{cluster.now}", name, "optim_step")
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        while cluster.runs:
            cluster.pass_time(work_s)
            cluster.execute(cluster.runs[0])
        cluster.pass_time(100.0 - work_s)


def test_a_job_is_planned_by_that_of_another_tenant_until_it_is_measured() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", tenant="one")
    train(cluster, "first", 4)
    later = submit(cluster, "later", tenant="two")
    assert later.demand.has_prior
    assert later.demand.trace is not None
    assert later.demand.trace.busy_s == pytest.approx(10.0)
    assert later.demand.trace.cycles == 0
    first = deployment_of(cluster, "first")
    assert later.placement.groups == first.placement.groups, "it shares at once"
    train(cluster, "later", 4, work_s=20.0)
    assert not later.demand.has_prior
    assert later.demand.trace.cycles == 3
    assert later.demand.trace.busy_s == pytest.approx(20.0)


def test_waiting_jobs_are_planned_by_the_first_measured_cycle_of_one_like_them() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first")
    waiting = [submit(cluster, f"waiting{number}", tenant=f"t{number}") for number in range(3)]
    assert not any(each.placement.groups for each in waiting)
    train(cluster, "first", 2)
    first = deployment_of(cluster, "first")
    assert first.demand.trace is not None
    assert first.demand.trace.cycles == 1
    assert all(each.demand.has_prior for each in waiting)
    assert all(each.placement.groups == first.placement.groups for each in waiting)


def test_jobs_without_a_profile_that_have_gpus_are_planned_by_one_like_them() -> None:
    cluster = cluster_of()
    cluster.start_node(4)
    submit(cluster, "first")
    beside = submit(cluster, "beside")
    late = submit(cluster, "late")
    train(cluster, "first", 2)
    assert beside.demand.has_prior
    assert beside.placement.reservation is not None
    assert beside.placement.reservation.trace is beside.demand.trace
    assert late.placement.groups


@pytest.mark.parametrize(
    ("spec", "is_alike"),
    [
        ({"model": {"path": "/home/two/m"}, "max_sequence_tokens": 512}, True),
        ({"model": {"path": "/home/one/m"}, "max_sequence_tokens": 4096}, False),
    ],
)
def test_a_like_job_has_the_same_limits_and_size_whatever_its_model_is_called(
    spec: dict[str, object], is_alike: bool
) -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    known = {"model": {"path": "/home/one/m"}, "max_sequence_tokens": 512}
    submit(cluster, "first", tenant="one", spec=json.dumps(known))
    train(cluster, "first", 4)
    later = submit(cluster, "later", tenant="two", spec=json.dumps(spec))
    assert later.demand.has_prior == is_alike
    assert "home" not in str(cluster.core.cluster.state.shapes)
    assert "first" not in str(cluster.core.cluster.state.shapes)


@pytest.mark.parametrize("spec", ["", "1", "[1]", "no JSON"])
def test_a_specification_may_say_anything(spec: str) -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", spec=spec)
    train(cluster, "first", 4)
    assert submit(cluster, "later", spec=spec).demand.has_prior
    assert not submit(cluster, "other", spec=spec + "2").demand.has_prior


def test_no_tenant_sees_the_demand_of_others() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", tenant="one")
    train(cluster, "first", 4)
    submit(cluster, "later", tenant="two")
    for sees_all in (False, True):
        found = cluster.core.explain_job("later", cluster.now, sees_all=sees_all)
        assert (found["deployments"][0]["profile"] is not None) == sees_all


def test_one_strange_job_does_not_decide_what_is_expected() -> None:
    cluster = cluster_of()
    cluster.start_node(2 * PROFILES_OF_SHAPE + 2)
    for number in range(PROFILES_OF_SHAPE):
        submit(cluster, f"j{number}", slo=0.25)
    for number in range(PROFILES_OF_SHAPE):
        train(cluster, f"j{number}", 4, work_s=1.0 if not number else 20.0)
    trace = submit(cluster, "later").demand.trace
    assert trace is not None
    assert trace.busy_s == pytest.approx(20.0)


def test_a_tight_bound_is_not_staked_on_the_demand_of_others() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", slo=0.2)
    train(cluster, "first", 4)
    later = submit(cluster, "later")
    assert later.demand.has_prior
    assert not later.placement.groups


def test_without_it_a_group_stays_closed_until_profiles_are_complete() -> None:
    cluster = cluster_of(learns_from_jobs=False)
    cluster.start_node(2)
    submit(cluster, "first")
    later = submit(cluster, "later", tenant="two")
    train(cluster, "first", 3)
    assert not later.placement.groups
    train(cluster, "first", 1)
    assert not later.demand.has_prior
    assert later.demand.trace is None


def test_a_restored_scheduler_expects_the_same() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", tenant="one")
    train(cluster, "first", 2)
    submit(cluster, "later", tenant="two")
    body = cluster.core.dump()
    restored = SchedulerCore.restore(cluster.config, body)
    assert restored.dump() == body
    restored.check_invariants()
    assert restored.cluster.state.shapes == cluster.core.cluster.state.shapes
    assert restored.cluster.state.deployments[DeploymentId("later/actor")].demand.has_prior


@pytest.mark.parametrize("restored", [False, True])
def test_the_one_whose_earlier_jobs_were_longest_goes_first(restored: bool) -> None:
    cluster = FakeCluster(policy="spread+backfill", longest_first=True)
    cluster.start_node(2)
    for name, length_s in (("short", 100.0), ("long", 50_000.0)):
        submit_alone(cluster, f"{name}1", name)
        cluster.pass_time(length_s)
        finish(cluster, f"{name}1")
    names = ("holder", "short", "unknown", "long")
    for name in names:
        submit_alone(cluster, f"{name}2", name)
    if restored:
        cluster.restart_scheduler(restored=True)
    order: list[str] = []
    for _ in names:
        (now,) = (each for each in names if deployment_of(cluster, f"{each}2").placement.groups)
        order.append(now)
        finish(cluster, f"{now}2")
    assert order == ["holder", "long", "unknown", "short"]


def submit_alone(cluster: FakeCluster, job: str, name: str, **fields: object) -> Deployment:
    """A job with a name that is not its own, which shares with nobody."""
    cluster.send(
        ev.JobSubmitted(
            job=job,
            tenant="t",
            name=name,
            controller_timeout_s=1e6,
            reattach_timeout_s=1e6,
        )
    )
    cluster.deploy(f"{job}/actor", workers=2, exclusive=True, **fields)
    return deployment_of(cluster, job)


def finish(cluster: FakeCluster, job: str) -> None:
    cluster.send(ev.JobFinished(job=job, outcome="completed"))


def one_cycle(cluster: FakeCluster, job: str, work_s: float) -> None:
    """A cycle of 100 s; the submission of the next one ends it."""
    train(cluster, job, 0, work_s)


def learn(cluster: FakeCluster, *, learns: bool) -> None:
    """Restart the scheduler with this setting."""
    settings = core_settings(cluster.core.settings.config) | {"learns_from_jobs": learns}
    cluster.send(ev.SchedulerStarted(settings=settings))
    for node, each in list(cluster.core.cluster.state.nodes.items()):
        cluster.join_node(each.gpus, node)
    cluster.join_router()


def busy_s(deployment: Deployment) -> float:
    assert deployment.demand.trace is not None
    return deployment.demand.trace.busy_s


def test_a_waiting_job_does_not_keep_the_prior_of_an_unusual_cycle() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    first, waiting = submit(cluster, "first"), submit(cluster, "waiting", tenant="two")
    for work_s in (10.0, 97.0, 10.0):
        one_cycle(cluster, "first", work_s)
    assert busy_s(waiting) == pytest.approx(97.0)
    assert not waiting.placement.groups
    for _ in range(3):
        one_cycle(cluster, "first", 10.0)
    assert busy_s(waiting) == pytest.approx(10.0)
    assert waiting.placement.groups == first.placement.groups


def test_waiting_jobs_of_one_shape_have_one_prior() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", slo=0.05)
    waiting = [submit(cluster, f"waiting{number}") for number in range(3)]
    train(cluster, "first", 2)
    before = waiting[0].demand.trace
    assert before is not None
    train(cluster, "first", 4, work_s=11.0)
    same = {id(each.demand.trace) for each in waiting} == {id(before)}
    assert same, "a small change renews nothing"
    assert len(list(cluster.core.cluster.queues.waiting.kinds())) == 1


def test_waiting_jobs_of_one_name_are_of_one_kind_although_the_usual_length_has_changed() -> None:
    cluster = FakeCluster(policy="spread+backfill")
    cluster.start_node(2)
    for number in range(2):
        submit_alone(cluster, f"ended{number}", "name")
        cluster.pass_time(4000.0 + 100.0 * number)
        if not number:
            finish(cluster, "ended0")
            submit_alone(cluster, "holder", "name")
            submit_alone(cluster, "one", "name")
    cluster.send(ev.JobFinished(job="ended1", outcome="cancelled"))
    finish(cluster, "holder")
    submit_alone(cluster, "two", "name")
    jobs = cluster.core.cluster.state.jobs
    assert jobs[JobId("one")].usual_s == jobs[JobId("two")].usual_s == 4096.0
    lengths = cluster.core.cluster.state.lengths
    assert list(lengths.values()) != [4000.0]


def test_a_tenant_is_told_nothing_that_follows_from_the_demand_of_others() -> None:
    cluster = cluster_of()
    cluster.start_node(4)
    submit(cluster, "first", tenant="one")
    train(cluster, "first", 4, work_s=37.0)
    finish(cluster, "first")
    submit(cluster, "l1", tenant="two", slo=0.2)
    submit(cluster, "l2", tenant="two")
    submit(cluster, "l3", tenant="two")
    submit(cluster, "known", tenant="two")
    cluster.deploy("known/b", workers=2, trace=TRACE)
    figures = ("shift_s", "overlap_s", "interference_s", "contention")
    for job in ("l1", "l2", "l3", "known"):
        for view in cluster.core.explain_job(JobId(job), cluster.now)["deployments"]:
            placed = view["placement"]
            assert placed is None or not any(dict(placed)[name] is not None for name in figures)
            assert not view["near"]
    seen = cluster.core.explain_job(JobId("l3"), cluster.now, sees_all=True)["deployments"][0]
    assert seen["near"] or seen["placement"]


def test_no_tight_bound_is_staked_on_one_cycle_of_a_predecessor() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit_named(cluster, "first", "name")
    waiting = submit_named(cluster, "waiting", "name", slo=0.05)
    train(cluster, "first", 2)
    later = submit_named(cluster, "later", "name", slo=0.05)
    assert waiting.demand.has_prior
    assert later.demand.has_prior
    assert not waiting.placement.groups
    assert not later.placement.groups


def submit_named(cluster: FakeCluster, job: str, name: str, **fields: object) -> Deployment:
    """A job of two GPUs with a name that is not its own."""
    submitted = {"controller_timeout_s": 1e6, "reattach_timeout_s": 1e6, **fields}
    cluster.send(ev.JobSubmitted(job=job, tenant="t", name=name, **submitted))
    cluster.deploy(f"{job}/actor", workers=2)
    return deployment_of(cluster, job)


def test_exclusive_deployments_are_not_planned() -> None:
    cluster = cluster_of()
    cluster.start_node(4)
    alone = submit_alone(cluster, "alone", "name")
    submit_named(cluster, "first", "name")
    train(cluster, "first", 4)
    assert alone.demand.trace is None
    assert alone.placement.reservation is None or alone.placement.reservation.trace is None


def test_a_job_counts_once_however_many_deployments_it_has() -> None:
    cluster = cluster_of()
    cluster.start_node(30)
    for number in range(4):
        submit(cluster, f"j{number}", slo=0.25)
    for number in range(4):
        train(cluster, f"j{number}", 4, work_s=40.0)
    cluster.job("large", slo=0.25)
    for number in range(9):
        cluster.deploy(f"large/{number}", workers=2)
        train(cluster, f"large/{number}", 4, work_s=0.5)
    (demand,) = cluster.core.cluster.state.shapes.values()
    assert len(demand.profiles) == 5
    assert busy_s(submit(cluster, "later")) == pytest.approx(40.0)


def test_one_cycle_of_a_job_that_failed_counts_no_more_once_a_profile_is_complete() -> None:
    cluster = cluster_of()
    cluster.start_node(8)
    submit(cluster, "failed")
    train(cluster, "failed", 2, work_s=1.0)
    cluster.send(ev.JobFinished(job="failed", outcome="failed"))
    for number, work_s in enumerate((30.0, 60.0)):
        submit(cluster, f"j{number}", slo=0.25)
        train(cluster, f"j{number}", 5, work_s=work_s)
    assert busy_s(submit(cluster, "later")) == pytest.approx(60.0), "the median, not the least"


def test_what_was_learnt_is_not_used_while_learning_is_off() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit_named(cluster, "ended", "name")
    cluster.pass_time(50_000.0)
    finish(cluster, "ended")
    first = submit_named(cluster, "first", "name")
    train(cluster, "first", 4)
    later = submit(cluster, "later", tenant="two")
    assert later.placement.groups == first.placement.groups
    usual = [cluster.core.cluster.state.jobs[JobId("first")].usual_s]
    learn(cluster, learns=False)
    assert later.demand.trace is None
    assert not later.demand.has_prior
    assert first.demand.trace is not None
    (group,) = cluster.core.cluster.state.groups.values()
    assert not cluster.core.cluster.capacity.inventory.is_open(group)
    waiting = submit(cluster, "waiting", tenant="three")
    submit_named(cluster, "named", "name")
    jobs = cluster.core.cluster.state.jobs
    usual += [jobs[JobId(job)].usual_s for job in ("first", "named")]
    assert usual == [65536.0, 0.0, 0.0]
    train(cluster, "first", 1)
    assert waiting.demand.trace is None
    learn(cluster, learns=True)
    assert waiting.demand.has_prior
    assert later.demand.has_prior
    assert jobs[JobId("named")].usual_s == 65536.0
    assert cluster.core.cluster.capacity.inventory.is_open(group)


def test_a_profile_of_one_cycle_is_completed_while_learning_is_off() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    first = submit(cluster, "first")
    train(cluster, "first", 2)
    assert first.demand.trace is not None
    learn(cluster, learns=False)
    assert first.demand.trace is None
    (group,) = cluster.core.cluster.state.groups.values()
    assert not cluster.core.cluster.capacity.inventory.is_open(group)
    train(cluster, "first", 6)
    assert first.demand.trace.cycles == 3


def test_the_shapes_are_bounded() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    first = submit(cluster, "first")
    train(cluster, "first", 4)
    state, long = cluster.core.cluster.state, "x" * 10_000
    for number in range(SHAPES_MAX + 9):
        first.spec.spec_json = f"{long}{number}"
        remember(cluster.core.cluster, first)
    first.spec.spec_json = "{}"
    assert len(state.shapes) == SHAPES_MAX
    assert max(map(len, state.shapes)) < 100


def test_deployments_for_other_types_of_node_are_not_alike() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first")
    train(cluster, "first", 4)
    cluster.join_node(2, "other", node_type="x")
    cluster.job("later")
    cluster.deploy("later/actor", workers=2, node_type="x")
    assert not deployment_of(cluster, "later").demand.has_prior


def test_a_member_that_was_awaited_in_vain_has_a_profile_with_a_prior() -> None:
    cluster = cluster_of(starvation_bound_s=150.0)
    cluster.start_node(4)
    submit(cluster, "first")
    silent = submit(cluster, "silent")
    cluster.pass_time(151.0)
    assert silent.demand.cycles.is_overdue
    train(cluster, "first", 2)
    assert silent.demand.has_prior
    assert not silent.demand.cycles.is_overdue


def test_another_layout_has_another_prior() -> None:
    cluster = cluster_of()
    cluster.start_node(4)
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout", 2, shares=True)
    rollout = cluster.core.cluster.state.deployments[DeploymentId("a/rollout")]
    shape = shape_key(rollout)
    cluster.core.cluster.state.shapes[shape] = ShapeDemand(profiles={9: TRACE}, prior=TRACE)
    cluster.job("b")
    cluster.deploy("b/rollout", "rollout", 2, shares=True)
    later = cluster.core.cluster.state.deployments[DeploymentId("b/rollout")]
    assert later.demand.has_prior
    cluster.relayout("b/rollout", "{other}")
    assert later.demand.trace is None
    assert not later.demand.has_prior
    assert later.placement.reservation is None or later.placement.reservation.trace is None


def test_a_paced_job_tells_nothing_of_jobs_that_compute() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit_alone(cluster, "paced", "same", pace="h800:qwen2.5-7b@0.01")
    cluster.pass_time(100.0)
    finish(cluster, "paced")
    state = cluster.core.cluster.state
    paced, real = state.deployments[DeploymentId("paced/actor")], submit_alone(cluster, "b", "same")
    assert usual_length(cluster.core.cluster, TenantId("t"), "same") == 0.0
    assert profile_key(state, paced) != profile_key(state, real)
    cluster.pass_time(50.0)
    finish(cluster, "b")
    assert usual_length(cluster.core.cluster, TenantId("t"), "same") == 64.0
