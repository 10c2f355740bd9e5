"""Jobs are planned by what earlier jobs of any tenant were, until they have been measured."""

import json

import pytest

from plexrl.ids import DeploymentId, TenantId
from plexrl.scheduler.accounting.earlier_jobs import PRIOR_OF, profile_key, usual_length
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment
from tests.scheduler.fake_cluster import FakeCluster


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
    for _ in range(cycles + 1):
        cluster.submit(f"{job}:{cluster.now}", f"{job}/actor", "optim_step")
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
    assert later.has_prior
    assert later.trace is not None
    assert later.trace.busy_s == pytest.approx(10.0)
    assert later.trace.cycles == 0
    assert later.groups == deployment_of(cluster, "first").groups, "it shares at once"
    train(cluster, "later", 4, work_s=20.0)
    assert not later.has_prior
    assert later.trace.cycles == 3
    assert later.trace.busy_s == pytest.approx(20.0)


def test_waiting_jobs_are_planned_by_the_first_measured_cycle_of_one_like_them() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first")
    waiting = [submit(cluster, f"waiting{number}", tenant=f"t{number}") for number in range(3)]
    assert not any(each.groups for each in waiting)
    train(cluster, "first", 2)
    first = deployment_of(cluster, "first")
    assert first.trace is not None
    assert first.trace.cycles == 1
    assert all(each.has_prior and each.groups == first.groups for each in waiting)


def test_jobs_without_a_profile_that_have_gpus_are_planned_by_one_like_them() -> None:
    cluster = cluster_of()
    cluster.start_node(4)
    submit(cluster, "first")
    beside = submit(cluster, "beside")
    late = submit(cluster, "late")
    train(cluster, "first", 2)
    assert beside.has_prior
    assert beside.reservation is not None
    assert beside.reservation.trace is beside.trace
    assert late.groups


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
    assert submit(cluster, "later", tenant="two", spec=json.dumps(spec)).has_prior == is_alike
    assert "home" not in str(cluster.core.cluster.state.priors)
    assert "first" not in str(cluster.core.cluster.state.priors)


@pytest.mark.parametrize("spec", ["", "1", "[1]", "no JSON"])
def test_a_specification_may_say_anything(spec: str) -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", spec=spec)
    train(cluster, "first", 4)
    assert submit(cluster, "later", spec=spec).has_prior
    assert not submit(cluster, "other", spec=spec + "2").has_prior


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
    cluster.start_node(2 * PRIOR_OF + 2)
    for number in range(PRIOR_OF):
        submit(cluster, f"j{number}", slo=0.25)
    for number in range(PRIOR_OF):
        train(cluster, f"j{number}", 4, work_s=1.0 if not number else 20.0)
    trace = submit(cluster, "later").trace
    assert trace is not None
    assert trace.busy_s == pytest.approx(20.0)


def test_a_tight_bound_is_not_staked_on_the_demand_of_others() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit(cluster, "first", slo=0.2)
    train(cluster, "first", 4)
    later = submit(cluster, "later")
    assert later.has_prior
    assert not later.groups


def test_without_it_a_group_stays_closed_until_profiles_are_complete() -> None:
    cluster = cluster_of(learns_from_jobs=False)
    cluster.start_node(2)
    submit(cluster, "first")
    later = submit(cluster, "later", tenant="two")
    train(cluster, "first", 3)
    assert not later.groups
    train(cluster, "first", 1)
    assert not later.has_prior
    assert later.trace is None


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
    assert restored.cluster.state.priors == cluster.core.cluster.state.priors
    assert restored.cluster.state.deployments[DeploymentId("later/actor")].has_prior


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
        (now,) = (each for each in names if deployment_of(cluster, f"{each}2").groups)
        order.append(now)
        finish(cluster, f"{now}2")
    assert order == ["holder", "long", "unknown", "short"]


def test_a_paced_job_tells_nothing_of_jobs_that_compute() -> None:
    cluster = cluster_of()
    cluster.start_node(2)
    submit_alone(cluster, "paced", "same", pace="h800:qwen2.5-7b@0.01")
    cluster.pass_time(100.0)
    finish(cluster, "paced")
    state = cluster.core.cluster.state
    paced, real = state.deployments[DeploymentId("paced/actor")], submit_alone(cluster, "b", "same")
    assert usual_length(state, TenantId("t"), "same") == 0.0
    assert profile_key(state, paced) != profile_key(state, real)
    cluster.pass_time(50.0)
    finish(cluster, "b")
    assert usual_length(state, TenantId("t"), "same") == 50.0
