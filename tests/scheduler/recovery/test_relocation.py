"""WPGs move to other GPUs: if it pays, if they wait too much, or if a node is drained."""

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plexrl.scheduler.placement.contention.service_level import waiting_bound
from plexrl.scheduler.recovery.evacuation import may_displace
from plexrl.scheduler.recovery.relocation import (
    CYCLES_MIN,
    REOPEN_PART,
    consider_relief,
    may_move,
)
from plexrl.scheduler.state.deployment.cycles import Cycle
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages import ReleaseState
from plexrl.wire.messages.views import PlacedDeploymentView
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster

REST_S = 100.0


def cluster_of(nodes: int = 2, gpus: int = 2, **changes: object) -> FakeCluster:
    """Nodes n0, n1, … and a policy that repacks."""
    fields: dict[str, object] = {"policy": "spread", "profile_cycles": 2, "anticipation": False}
    cluster = FakeCluster(**{**fields, "relief_after_s": 0.0, **changes})
    for index in range(nodes):
        cluster.join_node(gpus, f"n{index}")
    cluster.join_router()
    return cluster


def with_jobs(cluster: FakeCluster, *jobs: str) -> None:
    for job in jobs:
        cluster.job(job)
        cluster.deploy(f"{job}/actor")
    cluster.settle()


def explained(cluster: FakeCluster, job: str) -> PlacedDeploymentView:
    """The view of a job's first deployment."""
    return cluster.core.explain_job(job, cluster.now)["deployments"][0]


def moves(cluster: FakeCluster, job: str) -> int:
    count = explained(cluster, job)["moves"]
    assert isinstance(count, int)
    return count


def step(cluster: FakeCluster, job: str, operation: str, busy_s: float) -> None:
    """One cycle of a job: an optimizer step that takes `busy_s` on its group."""
    cluster.submit(operation, f"{job}/actor", "optim_step")
    for _ in range(100):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.migrations:
            cluster.migrate(cluster.migrations[0])
        elif cluster.runs:
            run = cluster.runs[0]
            if run.kind.value == "optim_step":
                cluster.pass_time(busy_s)
            cluster.execute(run)
        elif cluster.state_of(operation) == "finished":
            return
        else:
            assert cluster.timer_at is not None, f"nothing brings {operation} on"
            cluster.pass_time(max(0.0, cluster.timer_at - cluster.now))
    raise AssertionError(f"{operation} does not come to its end")


def live(cluster: FakeCluster, busy_s: dict[str, float], period_s: float, cycles: int) -> None:
    """Cycles of several jobs, one after the other in each period."""
    for _ in range(cycles):
        until = cluster.now + period_s
        for job, seconds in busy_s.items():
            if cluster.core.job_view(job, cluster.now)["ended_at"] is None:
                step(cluster, job, f"{job}:{cluster.now}", seconds)
        cluster.pass_time(max(0.0, until - cluster.now))


def test_a_profiled_job_moves_into_the_gap_of_another_and_frees_its_group() -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a", "b")
    assert len(cluster.core.list_groups(cluster.now)) == 2
    live(cluster, {"a": 20.0, "b": 20.0}, 100.0, 6)
    (group,) = cluster.core.list_groups(cluster.now)
    assert sorted(group["members"]) == ["a/actor", "b/actor"]
    assert moves(cluster, "a") + moves(cluster, "b") == 1
    live(cluster, {"a": 20.0, "b": 20.0}, 100.0, 6)
    assert moves(cluster, "a") + moves(cluster, "b") == 1


def test_a_job_without_a_gap_stays_alone() -> None:
    cluster = cluster_of(load_max=1.0)
    with_jobs(cluster, "a", "b")
    live(cluster, {"a": 55.0, "b": 35.0}, 90.1, 8)
    assert len(cluster.core.list_groups(cluster.now)) == 2
    assert moves(cluster, "a") + moves(cluster, "b") == 0


def test_a_job_alone_moves_for_a_waiting_job_although_no_gap_fits() -> None:
    """Without a waiting job both stay apart."""
    cluster = cluster_of(waiting_part_max=1.0, load_max=1.0)
    with_jobs(cluster, "a", "b")
    cluster.job("large")
    cluster.deploy("large/actor", workers=4)
    live(cluster, {"a": 55.0, "b": 35.0}, 90.1, 8)
    assert moves(cluster, "a") + moves(cluster, "b") == 1
    assert len(cluster.core.list_groups(cluster.now)) == 1
    cluster.send(ev.JobFinished(job="large", outcome="completed"))
    live(cluster, {"a": 55.0, "b": 35.0}, 90.1, 8)
    assert moves(cluster, "a") + moves(cluster, "b") == 1


@pytest.mark.parametrize(("state_gigabytes", "moved"), [(100, 1), (600, 0)])
def test_a_move_must_be_worth_its_cost(state_gigabytes: int, moved: int) -> None:
    cluster = FakeCluster(policy="spread", profile_cycles=2)
    for index in range(2):
        cluster.nodes[f"n{index}"] = ev.NodeJoined(
            node=f"n{index}",
            gpus=2,
            gpu_memory_bytes=10**12,
            host_memory_bytes=10**13,
            statemanager=f"sm:n{index}",
        )
        cluster.join_node(node=f"n{index}")
    cluster.join_router()
    for job in ("a", "b"):
        cluster.job(job)
        cluster.send(
            ev.DeploymentCreated(
                deployment=f"{job}/actor",
                job=job,
                kind="train",
                workers=2,
                state_bytes=state_gigabytes * 10**9,
                exclusive=False,
                spec_json="{}",
            )
        )
    cluster.settle()
    live(cluster, {"a": 20.0, "b": 20.0}, 100.0, 8)
    assert moves(cluster, "a") + moves(cluster, "b") == moved


lives = st.lists(
    st.tuples(
        st.fixed_dictionaries({job: st.sampled_from((5.0, 20.0, 45.0)) for job in "abc"}),
        st.sampled_from((60.0, 100.0, 150.0)),
    ),
    min_size=3,
    max_size=5,
)


@settings(
    max_examples=examples(8), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)
@given(st.sampled_from(("spread", "spread+backfill", "pack")), lives)
def test_no_sequence_of_profiles_makes_a_job_move_for_ever(
    policy: str, sequence: list[tuple[dict[str, float], float]]
) -> None:
    cluster = cluster_of(3, policy=policy, repack_interval_s=REST_S, horizon_slots=1200)
    with_jobs(cluster, "a", "b", "c")
    began_at = cluster.now
    left_at: dict[tuple[str, object], float] = {}
    homes = {job: explained(cluster, job)["group"] for job in "abc"}
    for busy_s, period_s in sequence:
        for _ in range(5):
            live(cluster, busy_s, period_s, 1)
            for job in "abc":
                home = explained(cluster, job)["group"]
                if home != homes[job]:
                    left_at[job, homes[job]] = cluster.now
                    came_back = left_at.get((job, home), -math.inf)
                    assert cluster.now - came_back >= REST_S, f"{job} goes to and fro"
                    homes[job] = home
    for job in "abc":
        most = math.log2((cluster.now - began_at) / REST_S) + 2
        assert moves(cluster, job) <= most


def test_a_group_with_a_member_that_waits_too_much_closes_until_it_waits_less() -> None:
    cluster = cluster_of(1, policy="pack")
    with_jobs(cluster, "a", "b")
    for _ in range(6):
        for job in ("a", "b"):
            cluster.submit(f"{job}:{cluster.now}", f"{job}/actor", "optim_step")
        while cluster.runs:
            cluster.pass_time(40.0 if cluster.runs[0].kind.value == "optim_step" else 0.0)
            if cluster.runs:
                cluster.execute(cluster.runs[0])
            cluster.pass_time(0.1)
        cluster.pass_time(10.0)
    (group,) = cluster.core.list_groups(cluster.now)
    assert group["is_closed"]
    cluster.job("c")
    cluster.deploy("c/actor")
    assert explained(cluster, "c")["state"] == "waiting"
    live(cluster, {"a": 20.0, "b": 20.0}, 100.0, 12)
    (group,) = cluster.core.list_groups(cluster.now)
    assert not group["is_closed"]
    assert "c/actor" in group["members"]


def crowd(cluster: FakeCluster, cycles: int) -> None:
    """`a` and `b` need the group at the same times."""
    for _ in range(cycles):
        names = [f"{job}:{cluster.now}" for job in "ab"]
        for job, name in zip("ab", names, strict=True):
            cluster.submit(name, f"{job}/actor", "optim_step")
        while not all(cluster.state_of(name) == "finished" for name in names):
            if cluster.launches:
                cluster.launch(cluster.launches[0])
            elif cluster.migrations:
                cluster.migrate(cluster.migrations[0])
            elif cluster.runs:
                cluster.pass_time(40.0 if cluster.runs[0].kind.value == "optim_step" else 0.0)
                cluster.execute(cluster.runs[0])
            else:
                cluster.pass_time(0.1)
        cluster.pass_time(10.0)


def test_the_member_that_waits_most_moves_and_its_old_waits_do_not_count() -> None:
    cluster = cluster_of(1, policy="pack")
    with_jobs(cluster, "a", "b")
    cluster.join_node(2, "n1")
    crowd(cluster, 8)
    assert moves(cluster, "a") + moves(cluster, "b") == 1
    (mover,) = [job for job in "ab" if moves(cluster, job)]
    assert "waited" in str(explained(cluster, mover)["moved_because"])
    groups = cluster.core.list_groups(cluster.now)
    assert len(groups) == 2
    with_jobs(cluster, "c", "d")
    live(cluster, {"c": 5.0, "d": 5.0}, 100.0, 2)
    live(cluster, {"a": 5.0, "b": 5.0, "c": 5.0, "d": 5.0}, 100.0, 2)
    new = next(g for g in cluster.core.list_groups(cluster.now) if f"{mover}/actor" in g["members"])
    assert not new["is_closed"], "the waits of the old group say nothing of the new one"


def drain(cluster: FakeCluster, node: str, *, is_draining: bool = True) -> None:
    cluster.send(ev.NodeDrainChanged(node=node, is_draining=is_draining))


def test_a_drain_waits_for_the_operation_and_loses_none() -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a")
    names = [f"a:{index}" for index in range(5)]
    for name in names:
        cluster.submit(name, "a/actor", "forward_backward")
    cluster.execute(cluster.runs[0])
    (running,) = cluster.runs
    drain(cluster, "n0")
    assert cluster.runs == [running], "what runs is not cut off"
    explanation = cluster.explanation_of("a:1")
    assert explanation["rule"] == "relocation"
    cluster.execute(running)
    assert [run.kind.value for run in cluster.runs] == ["offload"]
    cluster.execute(cluster.runs[0])
    (migration,) = cluster.migrations
    assert (migration.nodes, migration.sources, migration.seq) == (("n1",), ("sm:n0",), 1)
    assert cluster.explanation_of("a:1")["rule"] == "migrating"
    cluster.settle()
    assert [cluster.state_of(name) for name in names] == ["finished"] * 5
    assert cluster.wpgs["a/actor"].device == names
    assert explained(cluster, "a")["nodes"] == ["n1"]
    assert not cluster.core.list_nodes()[0]["groups"]


def test_a_drain_moves_what_fits_elsewhere() -> None:
    cluster = cluster_of(2, gpus=4)
    cluster.job("a")
    for name, kind in (("a/one", "train"), ("a/two", "rollout")):
        cluster.deploy(name, kind)
        cluster.submit(f"{name}:1", name, "barrier")
    cluster.settle()
    drain(cluster, "n0")
    cluster.settle()
    assert [node["gpus_reserved"] for node in cluster.core.list_nodes()] == [0, 4]
    drain(cluster, "n1")
    cluster.settle()
    assert [node["gpus_reserved"] for node in cluster.core.list_nodes()] == [0, 4]
    cluster.submit("again", "a/one", "barrier")
    cluster.settle()
    assert cluster.state_of("again") == "finished", "it works on where it is"
    drain(cluster, "n0", is_draining=False)
    cluster.settle()
    assert [node["gpus_reserved"] for node in cluster.core.list_nodes()] == [4, 0]


def test_of_two_moves_to_the_same_group_one_happens_and_the_other_waits() -> None:
    cluster = cluster_of(1, gpus=4)
    cluster.join_node(2, "n1")
    cluster.job("a")
    for name in ("a/one", "a/two"):
        cluster.deploy(name, "rollout")
        cluster.submit(f"{name}:1", name, "barrier")
    cluster.settle()
    drain(cluster, "n0")
    cluster.settle()
    assert [node["gpus_reserved"] for node in cluster.core.list_nodes()] == [2, 2]
    for name in ("a/one", "a/two"):
        cluster.submit(f"{name}:2", name, "barrier")
    cluster.settle()
    assert [cluster.state_of(f"{name}:2") for name in ("a/one", "a/two")] == ["finished"] * 2


def test_ending_a_drain_cancels_the_move() -> None:
    cluster = cluster_of()
    with_jobs(cluster, "a")
    for index in range(3):
        cluster.submit(f"a:{index}", "a/actor", "forward_backward")
    cluster.execute(cluster.runs[0])
    drain(cluster, "n0")
    drain(cluster, "n0", is_draining=False)
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]
    assert (explained(cluster, "a")["nodes"], moves(cluster, "a")) == (["n0"], 0)
    assert not cluster.migrations


def migrating() -> FakeCluster:
    """`a` has trained and migrates from n0 to n1."""
    cluster = cluster_of()
    with_jobs(cluster, "a")
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.settle()
    drain(cluster, "n0")
    cluster.execute(cluster.runs[0])
    assert len(cluster.migrations) == 1
    return cluster


def test_each_new_node_is_sent_the_part_of_its_own_ranks() -> None:
    cluster = cluster_of(nodes=4)
    cluster.job("a")
    cluster.deploy("a/actor", workers=4)
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.settle()
    drain(cluster, "n0")
    drain(cluster, "n1")
    cluster.execute(cluster.runs[0])
    (migration,) = cluster.migrations
    assert migration.nodes == ("n2", "n3")
    assert sorted(migration.sources) == ["sm:n0", "sm:n1"]
    assert [placed.rank for placed in migration.ranks] == [0, 1, 2, 3]
    by_node = {node: [p.rank for p in migration.ranks if p.node == node] for node in ("n2", "n3")}
    assert by_node == {"n2": [0, 1], "n3": [2, 3]}


def test_a_failed_migration_is_retried() -> None:
    cluster = migrating()
    for _ in range(3):
        cluster.migrate(cluster.migrations[0], error="no route")
        assert not cluster.migrations
        cluster.pass_time(2.0)
        assert len(cluster.migrations) == 1
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1"]


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_node_that_dies_during_a_migration_loses_nothing(node: str) -> None:
    cluster = migrating()
    cluster.lose_node(node)
    for migration in list(cluster.migrations):
        cluster.migrate(migration, error="connection lost")
    cluster.pass_time(10.0)
    cluster.join_node(node=node)
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.pass_time(10.0)
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1"]


def test_a_job_that_ends_during_its_migration_leaves_nothing_behind() -> None:
    cluster = migrating()
    commands = cluster.send(ev.JobFinished(job="a", outcome="cancelled"))
    (release,) = [each for each in commands if isinstance(each, ReleaseState)]
    assert release.nodes == ("n0", "n1")
    cluster.migrations.clear()
    cluster.send(ev.StateMigrated(deployment="a/actor", node="n1", seq=1))
    cluster.pass_time(10.0)
    cluster.settle()
    assert not cluster.core.list_groups(cluster.now)


def test_a_restarted_scheduler_continues_a_migration() -> None:
    cluster = migrating()
    cluster.restart_scheduler()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1"]


def test_a_wpg_moves_only_after_its_rebuild_is_complete() -> None:
    cluster = cluster_of(snapshot_operations=10)
    with_jobs(cluster, "a")
    names = [f"a:{index}" for index in range(4)]
    for name in names:
        cluster.submit(name, "a/actor", "forward_backward")
    cluster.settle()
    cluster.kill("a/actor")
    cluster.launch(cluster.launches[0])
    cluster.submit("a:4", "a/actor", "forward_backward")
    cluster.execute(cluster.runs[0])
    cluster.execute(cluster.runs[0])
    drain(cluster, "n0")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == [*names, "a:4"]
    assert explained(cluster, "a")["nodes"] == ["n1"]


def test_a_trainer_stays_until_its_published_weights_are_pulled() -> None:
    cluster = cluster_of(3)
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout")
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/rollout", "generate")
    cluster.submit("a:3", "a/rollout", "sync_weights", source="a/actor")
    for _ in range(3):
        cluster.execute(next(run for run in cluster.runs if run.deployment == "a/actor"))
    drain(cluster, "n0")
    assert [run.deployment for run in cluster.runs] == ["a/rollout"]
    cluster.execute(cluster.runs[0])
    (sync,) = cluster.runs
    assert (sync.kind.value, sync.sources) == ("sync_weights", ("sm:n0",))
    cluster.execute(sync)
    assert [run.kind.value for run in cluster.runs] == ["offload"]
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n2"]


def test_a_wpg_that_moves_to_fewer_nodes_releases_its_state_on_the_others() -> None:
    cluster = cluster_of(2, gpus=2)
    cluster.job("a")
    cluster.deploy("a/actor", workers=4)
    cluster.submit("a:0", "a/actor", "forward_backward")
    cluster.settle()
    cluster.join_node(4, "n2")
    drain(cluster, "n0")
    cluster.settle()
    assert explained(cluster, "a")["nodes"] == ["n2"]
    wpg = cluster.wpgs["a/actor"]
    assert all(nodes == {"n2"} for nodes in wpg.held_on.values() if nodes)


def test_a_wpg_whose_state_is_being_copied_is_not_displaced() -> None:
    cluster = migrating()
    context = cluster.core._context
    deployment = context.state.deployment("a/actor")
    assert not may_displace(context, deployment)
    cluster.settle()
    assert may_displace(context, deployment)


def test_each_move_doubles_the_time_until_the_next_one() -> None:
    cluster = cluster_of(repack_interval_s=REST_S)
    with_jobs(cluster, "a")
    context = cluster.core._context
    deployment = context.state.deployment("a/actor")
    for count in range(4):
        rest_s = REST_S * 2**count
        deployment.wpg.moves.count, deployment.wpg.moves.last_at = count, 1000.0
        assert not may_move(context.settings, deployment, 1000.0 + rest_s - 1.0)
        assert may_move(context.settings, deployment, 1000.0 + rest_s)


@pytest.mark.parametrize(("waited", "reopens"), [(REOPEN_PART * 0.99, True), (0.95, False)])
def test_a_closed_group_opens_only_if_its_members_wait_much_less_than_they_accept(
    waited: float, reopens: bool
) -> None:
    cluster = cluster_of(1, policy="pack")
    with_jobs(cluster, "a", "b")
    whole = cluster.core._context.cluster
    deployment = whole.state.deployment("a/actor")
    (group,) = whole.state.groups.values()
    group.is_closed = True
    part = waited * waiting_bound(whole, deployment)
    for index in range(CYCLES_MIN):
        at = cluster.now + 1.0 + index
        deployment.demand.cycles.add(Cycle(at, 100.0, 100.0 * part, 10.0, ()))
    assert not consider_relief(whole, deployment, cluster.now)
    assert group.is_closed is not reopens
