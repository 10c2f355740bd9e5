"""Rollouts for which the scheduler decides whether they share: a job alone pays for no switches."""

import pytest

from plexrl.errors import CapacityError, ConflictError
from plexrl.ids import DeploymentId, JobId
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.placement.fit.feasibility import is_possible
from plexrl.scheduler.rules.switch_cost import _path
from plexrl.scheduler.state.demand.estimates import MoveLaw
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.placement.test_shared_rollouts import (
    PLANNED,
    busy,
    explained,
    group_of,
    run_cycle,
)


def job(
    cluster: FakeCluster,
    name: str,
    trains: float | None = 0.3,
    rolls_out: float | None = 0.6,
    workers: tuple[int, int] = (2, 2),
    **fields: object,
) -> None:
    """A job whose training and rollout have GPUs at once; the rollout is undecided."""
    cluster.job(name, gang=2, **fields)
    demand = None if trains is None else busy(trains)
    cluster.deploy(f"{name}/actor", workers=workers[0], trace=demand)
    demand = None if rolls_out is None else busy(rolls_out)
    rollout(cluster, f"{name}/rollout", workers[1], trace=demand)


def rollout(cluster: FakeCluster, name: str, workers: int = 2, **fields: object) -> None:
    cluster.deploy(name, "rollout", workers=workers, shares_if_scarce=True, **fields)


def is_exclusive(cluster: FakeCluster, name: str) -> bool:
    return cluster.core.deployment_view(DeploymentId(name), cluster.now)["exclusive"]


def is_together(cluster: FakeCluster, name: str) -> bool:
    """Whether the job's rollout is on GPUs of its training."""
    actor, rollout = (
        cluster.core.deployment_view(DeploymentId(f"{name}/{each}"), cluster.now)["groups"]
        for each in ("actor", "rollout")
    )
    assert actor, f"{name} has no GPUs"
    assert rollout, f"{name} has no GPUs"
    return not set(actor).isdisjoint(rollout)


def test_a_job_alone_keeps_gpus_of_its_own_however_long_it_runs() -> None:
    cluster = FakeCluster(policy=PLANNED, snapshot_operations=100)
    cluster.start_node(gpus=4)
    job(cluster, "a")
    for number in range(7):
        run_cycle(cluster, number)
    assert not is_together(cluster, "a")
    assert is_exclusive(cluster, "a/rollout")
    assert explained(cluster, "a/rollout")["moves"] == 0
    assert explained(cluster, "a/rollout")["sharing"] == (
        "has GPUs of its own: nobody waits for GPUs"
    )


def test_it_moves_to_its_training_once_another_job_waits() -> None:
    cluster = FakeCluster(policy=PLANNED, snapshot_operations=100)
    cluster.start_node(gpus=4)
    job(cluster, "a", None, None)
    for number in range(4):
        run_cycle(cluster, number)
    assert not is_together(cluster, "a")
    # Nobody can share with it: it works all the time.
    cluster.job("b")
    cluster.deploy("b/actor", workers=2, trace=busy(1.0))
    assert group_of(cluster, "b/actor") is None
    assert "b/actor waits for 2 GPUs" not in explained(cluster, "a/rollout")["sharing"]
    for number in range(4, 6):
        run_cycle(cluster, number)
    cluster.settle()
    assert is_together(cluster, "a")
    assert group_of(cluster, "b/actor") is not None
    why = explained(cluster, "a/rollout")["sharing"]
    assert why.startswith("shares GPUs: b/actor waited for 2 GPUs; switches with a/actor take")
    group = next(g for g in cluster.core.list_groups(cluster.now) if "a/rollout" in g["members"])
    assert group["sharing"] == f"a/rollout {why}"


def test_where_free_gpus_do_not_suffice_a_new_job_takes_turns_with_itself() -> None:
    for workers in ((2, 2), (3, 2)):
        cluster = FakeCluster(policy=PLANNED)
        cluster.start_node(gpus=sum(workers))
        cluster.job("a")
        cluster.deploy("a/actor", workers=workers[1], trace=busy(1.0))
        cluster.job("b")
        cluster.deploy("b/actor", workers=workers[0], trace=busy(0.3))
        rollout(cluster, "b/rollout", workers[1], trace=busy(0.6))
        assert is_together(cluster, "b")
        assert "there were none of its own for it" in explained(cluster, "b/rollout")["sharing"]


def test_a_gang_that_finds_no_gpus_begins_to_share_at_once() -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=6)
    job(cluster, "a", workers=(3, 2))
    job(cluster, "b", workers=(3, 2))
    assert not is_together(cluster, "a")
    assert group_of(cluster, "b/rollout") is None
    assert not is_exclusive(cluster, "b/rollout")


@pytest.mark.parametrize(
    ("trains", "rolls_out", "fields"),
    [
        pytest.param(0.9, 0.9, {}, id="asynchronous"),
        pytest.param(0.3, 0.6, {"slo": 1e-12}, id="switches cost more than the service level"),
        pytest.param(None, None, {"slo": 0.1}, id="nobody can tell that the level is kept"),
    ],
)
def test_it_never_shares_where_that_would_cost_its_job_more_than_it_accepts(
    trains: float | None, rolls_out: float | None, fields: dict[str, object]
) -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=6)
    cluster.job("a")
    cluster.deploy("a/actor", workers=4, exclusive=True)
    cluster.job("b", **fields)
    cluster.deploy("b/actor", workers=2, trace=None if trains is None else busy(trains))
    rollout(cluster, "b/rollout", trace=None if rolls_out is None else busy(rolls_out))
    assert group_of(cluster, "b/actor") is not None
    assert group_of(cluster, "b/rollout") is None
    assert is_exclusive(cluster, "b/rollout")
    assert explained(cluster, "b/rollout")["sharing"].startswith("has GPUs of its own: ")


def test_a_job_larger_than_the_cluster_takes_turns_under_every_policy_that_shares() -> None:
    for policy in ("pack", PLANNED):
        for is_first in (False, True):
            cluster = FakeCluster(policy=policy)
            cluster.start_node(gpus=2)
            cluster.job("a")
            if is_first:
                rollout(cluster, "a/rollout")
            cluster.deploy("a/actor")
            if not is_first:
                rollout(cluster, "a/rollout")
            assert is_together(cluster, "a")
    alone = FakeCluster(policy="isolated")
    alone.start_node(gpus=2)
    alone.job("a")
    alone.deploy("a/actor")
    with pytest.raises(CapacityError):
        rollout(alone, "a/rollout")


def test_policies_that_do_not_plan_by_time_leave_it_alone() -> None:
    cluster = FakeCluster(policy="pack")
    cluster.start_node(gpus=4)
    job(cluster, "a")
    job(cluster, "b")
    assert not is_together(cluster, "a")
    assert is_exclusive(cluster, "b/rollout")
    assert "policy pack does not plan by time" in explained(cluster, "a/rollout")["sharing"]


def test_it_may_be_created_again_after_it_began_to_share() -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=2)
    cluster.job("a")
    cluster.deploy("a/actor", trace=busy(0.3))
    for _ in range(2):
        rollout(cluster, "a/rollout", trace=busy(0.6))
    assert is_together(cluster, "a")


def test_a_tenant_is_not_told_which_other_tenants_job_waited() -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=4)
    cluster.job("z", tenant="u")
    cluster.deploy("z/actor", workers=3, trace=busy(1.0))
    cluster.job("b", tenant="u")
    cluster.deploy("b/actor", workers=2, trace=busy(1.0))
    cluster.job("a")
    cluster.deploy("a/actor", workers=1, trace=busy(0.3))
    rollout(cluster, "a/rollout", 1, trace=busy(0.6))
    seen = cluster.core.explain_job("a", cluster.now, sees_all=False)["deployments"][1]["sharing"]
    assert seen.startswith("shares GPUs: another tenant's job waits for 2 GPUs"), seen


@pytest.mark.parametrize("shares", [False, True])
def test_who_leaves_it_open_accepts_what_was_said_before(shares: bool) -> None:
    """A job that an earlier version began is resumed by a controller that leaves it open."""
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=4)
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout", workers=1, shares=shares)
    rollout(cluster, "a/rollout", 1)
    with pytest.raises(ConflictError, match=f"shares_gpus \\({shares}, not {not shares}\\)"):
        cluster.deploy("a/rollout", "rollout", workers=1, shares=not shares)


def test_a_restored_core_names_the_same_deployment_that_waits() -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=4)
    cluster.join_node(gpus=3, node="m")
    for name, workers in (("o/actor", 3), ("a/actor", 1), ("f/x", 3), ("w/actor", 2)):
        cluster.job(name[0])
        trace = busy(0.3) if name == "a/actor" else None
        cluster.deploy(name, workers=workers, exclusive=name != "a/actor", trace=trace)
    while cluster.launches:
        cluster.launch(cluster.launches[0])
    # The oldest is displaced, and waits in a queue that was made after those of younger ones.
    cluster.lose_node("m")
    cluster.pass_time(4000.0)
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump())
    created = ev.DeploymentCreated(
        deployment=DeploymentId("a/rollout"),
        job=JobId("a"),
        kind="rollout",
        workers=1,
        spec_json="{}",
        exclusive=False,
        state_bytes=1000,
        shares_if_scarce=True,
        trace=busy(0.6),
    )
    for core in (cluster.core, restored):
        core.handle(created, cluster.now)
    assert restored.dump() == cluster.core.dump()
    assert cluster.core.cluster.state.deployments[DeploymentId("a/rollout")].spec.shares_for


def test_whether_a_gang_is_possible_follows_measured_moves_as_in_a_restored_core() -> None:
    cluster = FakeCluster(policy=PLANNED, mixed_sizes=True)
    cluster.start_node(gpus=4)
    cluster.job("z")
    cluster.deploy("z/actor", workers=4, exclusive=True)
    cluster.job("a", gang=2, slo=0.2)
    cluster.deploy("a/actor", workers=4, trace=busy(0.3), state_bytes=1 << 28)
    cluster.deploy(
        "a/rollout", "rollout", workers=2, shares=True, trace=busy(0.5), state_bytes=1 << 28
    )
    state = cluster.core.cluster.state
    actor = state.deployments[DeploymentId("a/actor")]
    assert is_possible(cluster.core.cluster, actor)
    # Moves on such nodes turn out to take minutes, more than the job accepts.
    holder = state.deployments[DeploymentId("z/actor")]
    for kind in (OperationKind.LOAD, OperationKind.OFFLOAD):
        law = state.move_laws.setdefault(
            _path(state, holder.placement.ranks, kind, "host"), MoveLaw()
        )
        for count in range(1, 6):
            law.observe(count << 28, count * 100.0)
    restored = SchedulerCore.restore(cluster.config, cluster.core.dump()).cluster
    assert not is_possible(restored, restored.state.deployments[DeploymentId("a/actor")])
    assert not is_possible(cluster.core.cluster, actor)
