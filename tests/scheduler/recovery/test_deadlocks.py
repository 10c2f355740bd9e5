"""Jobs that hold GPUs and wait for more do not deadlock."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.rules.policies import POLICIES
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


def placed(cluster: FakeCluster) -> list[str]:
    deployments = cluster.core._context.state.deployments.values()
    return sorted(each.deployment for each in deployments if each.placement.group is not None)


def end(cluster: FakeCluster, job: str) -> None:
    cluster.send(ev.JobFinished(job=job, outcome="completed"))


def two_halves(cluster: FakeCluster, *, launched: bool = False) -> None:
    """Each of two jobs has half of the GPUs and wants as many more."""
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", "rollout", workers=4)
        cluster.pass_time(1.0)
    if launched:
        cluster.settle()
    for job in ("a", "b"):
        cluster.deploy(f"{job}/rollout", "rollout", workers=4)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("launched", [False, True])
def test_of_two_deadlocked_jobs_the_older_continues(policy: str, launched: bool) -> None:
    cluster = cluster_of(8, policy=policy)
    two_halves(cluster, launched=launched)
    assert placed(cluster) == ["a/actor", "a/rollout"]
    end(cluster, "a")
    assert placed(cluster) == ["b/actor", "b/rollout"]
    cluster.settle()
    for name in ("b/actor", "b/rollout"):
        assert cluster.core.deployment_view(name, cluster.now)["state"] == "ready"


def test_a_preempted_job_gets_gpus_for_all_deployments_at_once() -> None:
    cluster = cluster_of(8)
    two_halves(cluster)
    cluster.job("c")
    cluster.deploy("c/actor", "rollout", workers=1)
    end(cluster, "a")
    assert placed(cluster) == ["b/actor", "b/rollout"]
    assert cluster.core.job_view("b", cluster.now)["state"] == "ADMITTED"


def test_the_job_of_the_lower_class_is_preempted() -> None:
    cluster = cluster_of(8)
    for job, priority in (("low", -1), ("high", 0)):
        cluster.job(job, priority=priority)
        cluster.deploy(f"{job}/actor", "rollout", workers=4)
        cluster.pass_time(1.0)
    cluster.deploy("low/rollout", "rollout", workers=4)
    cluster.deploy("high/rollout", "rollout", workers=4)
    assert placed(cluster) == ["high/actor", "high/rollout"]


def test_a_working_job_is_preempted_only_after_it_was_idle_for_the_bound() -> None:
    cluster = cluster_of(8)
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=4)
        cluster.pass_time(1.0)
    cluster.settle()
    for job in ("a", "b"):
        cluster.submit(f"{job}:1", f"{job}/actor", "optim_step")
    cluster.settle()
    while cluster.runs:
        cluster.execute(cluster.runs[0])
    for job in ("a", "b"):
        cluster.deploy(f"{job}/rollout", "rollout", workers=4)
    assert placed(cluster) == ["a/actor", "b/actor"]
    cluster.pass_time(BOUND_S / 2)
    assert placed(cluster) == ["a/actor", "b/actor"]
    cluster.pass_time(BOUND_S)
    assert placed(cluster) == ["a/actor", "a/rollout"]
    # Nothing that was done is lost.
    end(cluster, "a")
    cluster.settle()
    cluster.submit("b:2", "b/actor", "optim_step")
    cluster.settle()
    while cluster.runs:
        cluster.execute(cluster.runs[0])
    assert cluster.state_of("b:2") == "finished"
    assert cluster.wpgs["b/actor"].device == ["b:1", "b:2"]


def test_jobs_of_one_tenant_do_not_deadlock_on_their_quota() -> None:
    cluster = cluster_of(16)
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t"))
    cluster.send(
        ev.TenantConfigured(tenant="t", weight=1.0, jobs_max=None, gpus_max=8, gpu_seconds_max=None)
    )
    two_halves(cluster)
    assert placed(cluster) == ["a/actor", "a/rollout"]
    end(cluster, "a")
    assert placed(cluster) == ["b/actor", "b/rollout"]


def test_a_partial_job_that_became_impossible_releases_its_gpus() -> None:
    cluster = cluster_of(4, 4, node_replace_s=1e6)
    cluster.job("there")
    cluster.deploy("there/a", "rollout", workers=4)
    cluster.job("half")
    cluster.deploy("half/one", "rollout", workers=4)
    cluster.deploy("half/two", "rollout", workers=4)
    on = cluster.core.deployment_view("there/a", cluster.now)["ranks"][0]["node"]
    end_node = on
    cluster.lose_node(end_node)
    assert placed(cluster) == ["half/one", "there/a"], "nobody wants its GPUs"
    cluster.job("late")
    cluster.deploy("late/a", "rollout", workers=2)
    assert placed(cluster) == ["late/a", "there/a"]
    end(cluster, "late")
    end(cluster, "there")
    assert placed(cluster) == []
    cluster.join_node(node=end_node)
    assert placed(cluster) == ["half/one", "half/two"]


sizes = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=8)


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(POLICIES), sizes, st.randoms(use_true_random=False))
def test_all_jobs_get_their_gpus_in_any_order_of_deployments(
    policy: str, wanted: list[list[int]], chance: object
) -> None:
    cluster = cluster_of(6, policy=policy)
    wanted = [workers for workers in wanted if sum(workers) <= 6]
    order = [(job, at) for job, workers in enumerate(wanted) for at in range(len(workers))]
    chance.shuffle(order)  # type: ignore[attr-defined]
    for job in range(len(wanted)):
        cluster.job(f"j{job}")
    for job, at in order:
        cluster.deploy(f"j{job}/{at}", "rollout", workers=wanted[job][at])
    left = {f"j{job}": len(workers) for job, workers in enumerate(wanted)}
    while left:
        names = [name.split("/")[0] for name in placed(cluster)]
        whole = [job for job in sorted(left) if names.count(job) == left[job]]
        assert whole, f"{placed(cluster)} wait for each other"
        end(cluster, whole[0])
        del left[whole[0]]


def test_of_stuck_jobs_the_one_that_no_node_can_hold_gives_its_gpus_back() -> None:
    cluster = cluster_of(4, 4, 8, node_replace_s=1e6)
    for job in ("impossible", "half"):
        cluster.job(job)
        cluster.deploy(f"{job}/one", "rollout", workers=4)
        cluster.pass_time(1.0)
    cluster.job("large")
    cluster.deploy("large/one", "rollout", workers=8)
    on = {
        job: cluster.core.deployment_view(f"{job}/one", cluster.now)["ranks"][0]["node"]
        for job in ("impossible", "half", "large")
    }
    cluster.deploy("impossible/two", "rollout", workers=8)
    cluster.lose_node(on["large"])
    cluster.deploy("half/two", "rollout", workers=4)
    assert placed(cluster) == ["half/one", "half/two", "large/one"]
    first = cluster.core.explain_job("half", cluster.now)["deployments"][0]
    assert not first["moved_because"], "it gave its GPUs back too"
