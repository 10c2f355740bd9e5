"""Deployments of different sizes share GPUs: trainings on their own rollouts' GPUs and others, and
small deployments on a part of a large one's."""

import random
from collections import Counter

import msgspec
import pytest

from plexrl.ids import DeploymentId
from plexrl.scheduler.core.snapshot import decode, encode
from plexrl.scheduler.queries.eta import goes_before
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.records import Deployment, State
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.flat_deployments import flatten
from tests.scheduler.liveness import stuck
from tests.scheduler.placement.test_shared_rollouts import busy


def state_of(cluster: FakeCluster) -> State:
    return cluster.core._context.state


def placed(cluster: FakeCluster, name: str) -> Deployment:
    return state_of(cluster).deployments[DeploymentId(name)]


def gpus_of(cluster: FakeCluster, name: str) -> set[tuple[str, int]]:
    return {(rank.node, rank.gpu) for rank in placed(cluster, name).placement.ranks}


def synchronous(cluster: FakeCluster, job: str, rolls_out: int, trains: int) -> None:
    """A job whose rollout and larger training take turns, and get GPUs at once."""
    cluster.job(job, tenant=job, gang=2)
    cluster.deploy(f"{job}/actor", workers=trains, trace=busy(0.2, offset_s=50.0))
    trace = busy(0.3)
    cluster.deploy(f"{job}/rollout", "rollout", workers=rolls_out, shares=True, trace=trace)


def two_trainings() -> FakeCluster:
    """Two trainings on their own rollouts' two GPUs each, and on two more that they share; a job of
    one GPU is in one of these."""
    cluster = FakeCluster(policy="spread+backfill")
    cluster.start_node(gpus=6)
    synchronous(cluster, "a", 2, 4)
    synchronous(cluster, "b", 2, 4)
    cluster.job("small", tenant="small")
    cluster.deploy("small/actor", workers=1, trace=busy(0.1, offset_s=80.0))
    cluster.settle()
    return cluster


def test_a_training_lies_on_its_rollouts_gpus_and_on_others_that_trainings_share() -> None:
    cluster = two_trainings()
    a, b = gpus_of(cluster, "a/actor"), gpus_of(cluster, "b/actor")
    assert gpus_of(cluster, "a/rollout") < a
    assert gpus_of(cluster, "b/rollout") < b
    assert len(a & b) == 2
    assert gpus_of(cluster, "small/actor") < a & b
    assert len(state_of(cluster).groups) == 4
    cluster.core.check_invariants()


def cycle(cluster: FakeCluster, job: str, number: int) -> list[str]:
    """Submit the rollout and the training of one cycle."""
    names = [f"{job}:{number}:{kind}" for kind in ("roll", "train", "step")]
    cluster.submit(names[0], f"{job}/rollout", "generate", ends_burst=True)
    cluster.submit(names[1], f"{job}/actor", "forward_backward")
    cluster.submit(names[2], f"{job}/actor", "optim_step", ends_burst=True)
    return names


@pytest.mark.parametrize("killed", ["nobody", "a/actor", "a/rollout", "b/actor", "small/actor"])
def test_they_all_go_on_and_never_two_run_on_one_gpu(killed: str) -> None:
    cluster, names, chance = two_trainings(), list[str](), random.Random(1)
    for number in range(6):
        names += cycle(cluster, "a", number) + cycle(cluster, "b", number)
        cluster.submit(f"small:{number}", "small/actor", "optim_step")
        names.append(f"small:{number}")
        for _ in range(20):
            busy_gpus = Counter(
                gpu
                for each in {run.deployment for run in cluster.runs}
                for gpu in gpus_of(cluster, each)
            )
            assert max(busy_gpus.values(), default=0) <= 1, busy_gpus
            cluster.core.check_invariants()
            assert not stuck(cluster)
            if cluster.runs:
                cluster.execute(chance.choice(cluster.runs))
            cluster.pass_time(1.0)
        if number == 3 and killed != "nobody":
            cluster.kill(killed)
    cluster.settle()
    assert [name for name in names if cluster.state_of(name) != "finished"] == []


def spanning_cluster(**changes: object) -> FakeCluster:
    """`large/actor` has two GPUs, and one small job each of these."""
    cluster = FakeCluster(policy="spread+backfill", **changes)
    cluster.start_node(gpus=2)
    cluster.job("large", tenant="large")
    cluster.deploy("large/actor", workers=2, trace=busy(0.2))
    for number, at in enumerate((30.0, 55.0)):
        cluster.job(f"s{number}", tenant=f"s{number}")
        trace = busy(0.4, offset_s=at)
        cluster.deploy(f"s{number}/actor", workers=1, trace=trace)
    cluster.settle()
    return cluster


def test_small_deployments_use_parts_of_a_large_ones_gpus_at_the_same_time() -> None:
    cluster = spanning_cluster()
    assert placed(cluster, "large/actor").placement.spans
    assert gpus_of(cluster, "s0/actor") != gpus_of(cluster, "s1/actor")
    cluster.submit("one", "s0/actor", "optim_step")
    cluster.submit("other", "s1/actor", "optim_step")
    while any(run.kind is OperationKind.LOAD for run in cluster.runs):
        load = next(run for run in cluster.runs if run.kind is OperationKind.LOAD)
        cluster.execute(load)
    assert {run.operation for run in cluster.runs} == {"one", "other"}


def test_a_member_of_several_groups_is_not_starved_by_streams_of_small_ones() -> None:
    cluster = spanning_cluster(starvation_bound_s=60.0)
    cluster.compute_s = 7.0
    cluster.submit("large:0", "large/actor", "optim_step")
    cluster.settle()
    for number in range(40):
        for job in ("s0", "s1"):
            cluster.submit(f"{job}:{number}", f"{job}/actor", "optim_step")
    cluster.submit("large:1", "large/actor", "optim_step")
    asked_at = cluster.now
    while cluster.state_of("large:1") != "finished":
        assert cluster.now < asked_at + 60.0 + 4 * 7.0, "the bound, and what ran then"
        cluster.pass_time(3.5)
        for run in list(cluster.runs):
            if run in cluster.runs:
                cluster.execute(run)
    cluster.settle()
    assert all(cluster.state_of(f"s1:{number}") == "finished" for number in range(40))


def test_the_workers_of_a_divided_group_keep_the_name_of_theirs() -> None:
    cluster = FakeCluster(policy="spread+backfill")
    cluster.start_node(gpus=2)
    cluster.job("large")
    cluster.deploy("large/actor", workers=2, trace=busy(0.2))
    cluster.settle()
    started_in = placed(cluster, "large/actor").placement.group
    for name in ("s0", "s1"):
        cluster.job(name)
        cluster.deploy(f"{name}/actor", workers=1, trace=busy(0.1, offset_s=50.0))
        cluster.settle()
    assert placed(cluster, "large/actor").placement.spans
    assert placed(cluster, "large/actor").placement.group == started_in
    cluster.end("s0/actor")
    cluster.end("s1/actor")
    assert placed(cluster, "large/actor").placement.groups == (started_in,)


def test_an_operation_of_several_groups_is_explained_by_the_one_that_is_free_last() -> None:
    cluster = spanning_cluster()
    cluster.submit("known", "s1/actor", "optim_step")
    cluster.settle()
    cluster.submit("small", "s1/actor", "optim_step")
    while cluster.state_of("small") != "running":
        cluster.execute(cluster.runs[0])
    cluster.submit("large:0", "large/actor", "optim_step")
    found = cluster.explanation_of("large:0")
    assert found["rule"] == "burst"
    assert found["holder"] is not None
    assert found["eta_s"] is not None


def test_what_goes_before_on_another_group_at_the_same_time_delays_nobody_twice() -> None:
    cluster = spanning_cluster(anticipation=False)
    for number in (2, 3):
        cluster.job(f"s{number}", tenant=f"s{number}")
        cluster.deploy(f"s{number}/actor", workers=1, trace=busy(0.2, offset_s=5.0))
    cluster.settle()
    for number in range(4):
        cluster.submit(f"warm{number}", f"s{number}/actor", "optim_step")
        cluster.settle()
    large = placed(cluster, "large/actor")
    groups = [state_of(cluster).groups[name] for name in large.placement.groups]
    for group in groups:
        assert group.holder not in (None, large.deployment)
        cluster.submit(f"first/{group.group}", str(group.holder), "optim_step")
    waiting = [
        next(name for name in group.members if name not in (group.holder, large.deployment))
        for group in groups
    ]
    cluster.submit("next/0", waiting[0], "optim_step")
    cluster.pass_time(0.01)
    cluster.submit("large:0", "large/actor", "optim_step")
    before = cluster.explanation_of("large:0")["eta_s"]
    cluster.submit("next/1", waiting[1], "optim_step")
    ahead = goes_before(cluster.core.cluster, groups[0], large, cluster.now)
    assert {each.name for each in ahead} == set(waiting)
    assert cluster.explanation_of("large:0")["eta_s"] == pytest.approx(before, rel=0.05)


def test_a_border_goes_with_the_deployment_that_needed_it() -> None:
    cluster = spanning_cluster()
    before = placed(cluster, "large/actor").placement.ranks
    cluster.end("s0/actor")
    cluster.end("s1/actor")
    cluster.settle()
    (group,) = state_of(cluster).groups.values()
    assert [(gpu.node, gpu.gpu) for gpu in group.gpus] == [(gpu.node, gpu.gpu) for gpu in before]
    assert placed(cluster, "large/actor").placement.ranks == before
    cluster.submit("large:0", "large/actor", "optim_step")
    cluster.settle()
    assert cluster.state_of("large:0") == "finished"


def test_groups_of_equal_size_only_if_the_setting_says_so() -> None:
    cluster = spanning_cluster(mixed_sizes=False)
    assert placed(cluster, "s0/actor").placement.groups == ()
    assert not placed(cluster, "large/actor").placement.spans


def test_a_snapshot_of_one_group_each_becomes_one_of_several() -> None:
    cluster = spanning_cluster(mixed_sizes=False)
    cluster.submit("large:0", "large/actor", "optim_step")
    body = encode(cluster.core._context)
    plain = msgspec.msgpack.decode(body)
    plain["version"] = 3
    flatten(plain["state"])
    for deployment in plain["state"]["deployments"].values():
        groups = deployment.pop("groups")
        deployment["group"] = groups[0] if groups else None
    read = decode(msgspec.msgpack.encode(plain), cluster.core._context.settings.config)
    assert encode(read) == body


def test_a_gang_lies_on_some_of_its_rollouts_gpus_and_on_what_another_deployment_spans() -> None:
    cluster = FakeCluster(policy="spread+backfill", waiting_part_max=0.9)
    cluster.start_node(14)
    for job, workers in (("y", 2), ("x", 4)):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=workers, exclusive=True)
    cluster.job("hold")
    cluster.deploy("hold/actor", workers=2, trace=busy(0.5))
    cluster.job("large")
    cluster.deploy("large/actor", workers=6, trace=busy(0.05))
    for job in ("s0", "s1"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=2, trace=busy(0.45, offset_s=5.0))
    cluster.job("g", gang=3)
    cluster.deploy("g/rollout", "rollout", workers=2, shares=True, trace=busy(0.2))
    cluster.deploy("g/reference", "forward", workers=2, trace=busy(0.03, offset_s=20.0))
    cluster.deploy("g/actor", workers=8, trace=busy(0.1, offset_s=25.0))
    assert not placed(cluster, "g/actor").placement.groups
    cluster.send(ev.JobFinished(job="y", outcome="completed"))
    assert gpus_of(cluster, "g/actor") >= gpus_of(cluster, "large/actor")
