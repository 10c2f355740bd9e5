"""Rollouts that share their GPUs: with other jobs, and with the training of their own job."""

from plexrl.errors import PlexRLError
from plexrl.ids import DeploymentId, JobId
from plexrl.scheduler.placement.contention.colocation import may_take_turns, takes_turns
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.messages.views import PlacedDeploymentView
from tests.scheduler.fake_cluster import FakeCluster

PLANNED = "spread+backfill"


def busy(part: float, period_s: float = 100.0, offset_s: float = 0.0) -> DemandTrace:
    segment = Segment(offset_s=offset_s, duration_s=part * period_s)
    return DemandTrace(period_s=period_s, segments=(segment,))


def full_cluster(*, shares: bool) -> FakeCluster:
    """Two rollouts have all GPUs of the only node."""
    cluster = FakeCluster(policy="pack")
    cluster.start_node(gpus=4)
    cluster.job("a")
    for name in ("a/r0", "a/r1"):
        cluster.deploy(name, kind="rollout", workers=2, shares=shares)
    cluster.job("b")
    cluster.deploy("b/actor")
    cluster.settle()
    return cluster


def group_of(cluster: FakeCluster, name: str) -> str | None:
    return cluster.core.deployment_view(DeploymentId(name), cluster.now)["group"]


def explained(cluster: FakeCluster, name: str) -> PlacedDeploymentView:
    view = cluster.core.explain_job(JobId(name.split("/")[0]), cluster.now)
    return next(each for each in view["deployments"] if each["deployment"] == name)


def way_of(cluster: FakeCluster, name: str) -> str:
    record = explained(cluster, name)["placement"]
    assert record is not None, f"{name} has no GPUs"
    return record["way"]


def pair(cluster: FakeCluster, job: str, trains: float, rolls_out: float, workers: int = 2) -> None:
    """A job whose training and rollout have as many GPUs, and get them at once."""
    cluster.job(job, gang=2)
    cluster.deploy(f"{job}/actor", workers=workers, trace=busy(trains))
    trace = busy(rolls_out)
    cluster.deploy(f"{job}/rollout", "rollout", workers=workers, shares=True, trace=trace)


def test_a_trainer_joins_a_rollout_that_shares_and_no_other_one() -> None:
    sharing, usual = full_cluster(shares=True), full_cluster(shares=False)
    assert group_of(sharing, "b/actor") in (group_of(sharing, "a/r0"), group_of(sharing, "a/r1"))
    assert group_of(usual, "b/actor") is None


def test_a_rollout_of_unknown_demand_gets_gpus_of_its_own_if_there_are_any() -> None:
    for gpus, count in ((4, 2), (2, 1)):
        cluster = FakeCluster(policy="pack")
        cluster.start_node(gpus=gpus)
        cluster.job("a")
        cluster.deploy("a/actor")
        cluster.deploy("a/rollout", "rollout", workers=2, shares=True)
        cluster.settle()
        groups = {group_of(cluster, each) for each in ("a/actor", "a/rollout")}
        assert None not in groups
        assert len(groups) == count


def test_a_rollout_and_a_training_that_are_always_busy_share_where_a_job_has_no_other_way() -> None:
    for policy in ("pack", PLANNED):
        for gpus, count in ((2, 1), (4, 2)):
            cluster = FakeCluster(policy=policy)
            cluster.start_node(gpus=gpus)
            pair(cluster, "a", trains=1.0, rolls_out=0.8)
            cluster.settle()
            groups = {group_of(cluster, each) for each in ("a/actor", "a/rollout")}
            assert None not in groups
            assert len(groups) == count


def test_rollouts_of_one_job_never_share_a_group_with_each_other() -> None:
    for policy in ("pack", PLANNED):
        cluster = FakeCluster(policy=policy)
        cluster.start_node(gpus=4)
        cluster.job("a")
        for name in ("a/r0", "a/r1"):
            cluster.deploy(name, "rollout", workers=2, shares=True, trace=busy(0.1))
        cluster.job("b")
        cluster.deploy("b/r0", "rollout", workers=2, shares=True, trace=busy(0.1))
        cluster.settle()
        first, second, other = (group_of(cluster, each) for each in ("a/r0", "a/r1", "b/r0"))
        assert None not in (first, second, other)
        assert first != second
        assert other in (first, second)


def test_more_rollouts_of_one_job_than_there_are_groups_are_refused() -> None:
    cluster = FakeCluster(policy="pack")
    cluster.start_node(gpus=2)
    cluster.job("a")
    cluster.deploy("a/r0", "rollout", workers=2, shares=True)
    refused = False
    try:
        cluster.deploy("a/r1", "rollout", workers=2, shares=True)
    except PlexRLError as error:
        refused = error.code == "capacity"
    assert refused


def test_a_gang_with_two_rollouts_waits_as_impossible_when_a_node_is_lost() -> None:
    cluster = FakeCluster(policy="pack")
    cluster.start_node(gpus=2)
    cluster.join_node(gpus=2, node="m")
    cluster.lose_node("m")
    cluster.job("a", gang=2)
    for name in ("a/r0", "a/r1"):
        cluster.deploy(name, "rollout", workers=2, shares=True)
    cluster.job("b")
    cluster.deploy("b/actor")
    cluster.settle()
    assert group_of(cluster, "a/r0") is None
    assert group_of(cluster, "b/actor") is not None, "an impossible gang blocks others"


def test_synchronous_training_and_its_rollout_take_turns_on_one_group() -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=4)
    pair(cluster, "a", 0.3, 0.7)
    pair(cluster, "b", 0.2, 0.8)
    cluster.settle()
    for job in "ab":
        assert group_of(cluster, f"{job}/actor") == group_of(cluster, f"{job}/rollout")
        assert "colocated" in (way_of(cluster, f"{job}/actor"), way_of(cluster, f"{job}/rollout"))
    assert group_of(cluster, "a/actor") != group_of(cluster, "b/actor")


def test_asynchronous_training_keeps_apart_from_its_rollout() -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=4)
    pair(cluster, "a", 0.4, 1.0)
    cluster.settle()
    assert None not in (group_of(cluster, "a/actor"), group_of(cluster, "a/rollout"))
    assert group_of(cluster, "a/actor") != group_of(cluster, "a/rollout")


def test_only_one_rollout_takes_turns_with_trainings_of_its_own_job() -> None:
    def one(job: str, kind: str, duty: float | None) -> Deployment:
        return Deployment(
            deployment=DeploymentId(f"{job}/{kind}"),
            job=job,
            created_at=0.0,
            spec=RequestedSpec(
                kind=kind,
                workers=2,
                state_bytes=1,
                exclusive=False,
                spec_json="{}",
            ),
            demand=Demand(
                estimates=Estimates(1),
                trace=None if duty is None else busy(duty),
            ),
        )

    rollout, trains, scores = one("a", "rollout", 0.6), one("a", "train", 0.3), one("a", "f", 0.1)
    assert takes_turns((trains, rollout))
    assert takes_turns((rollout, trains, scores))
    assert not takes_turns((rollout,))
    assert not takes_turns((trains, scores))
    assert not takes_turns((rollout, trains, one("b", "train", 0.01)))
    assert not takes_turns((rollout, one("a", "rollout", 0.1), trains))
    assert not takes_turns((one("a", "rollout", 0.8), trains))
    assert not takes_turns((rollout, one("a", "train", None)))
    assert may_take_turns((rollout, one("a", "train", None)))


def until_it_runs(cluster: FakeCluster, operation: str) -> None:
    """Carry out what comes before an operation, without letting time pass but for timers."""
    for _ in range(200):
        if any(run.operation == operation for run in cluster.runs):
            return
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.migrations:
            cluster.migrate(cluster.migrations[0])
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            assert cluster.timer_at is not None, f"{operation} never runs"
            cluster.pass_time(cluster.timer_at - cluster.now)
    raise AssertionError(f"{operation} never runs")


def execute(cluster: FakeCluster, operation: str) -> None:
    cluster.execute(next(run for run in cluster.runs if run.operation == operation))


def run_cycle(cluster: FakeCluster, number: int, job: str = "a") -> None:
    """A generation of 60 s and a step of 40 s, after the weights were synced."""
    for name, kind, seconds, source in (
        ("rollout", "sync_weights", 0.0, f"{job}/actor"),
        ("rollout", "generate", 60.0, None),
        ("actor", "forward_backward", 30.0, None),
        ("actor", "optim_step", 10.0, None),
    ):
        cluster.submit(f"{job}{kind}{number}", f"{job}/{name}", kind, source)
        until_it_runs(cluster, f"{job}{kind}{number}")
        cluster.now += seconds
        execute(cluster, f"{job}{kind}{number}")


def test_a_rollout_is_profiled_by_its_generations_and_moves_to_its_own_training() -> None:
    cluster = FakeCluster(policy=PLANNED, snapshot_operations=100)
    cluster.start_node(gpus=4)
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout", workers=2, shares=True)
    cluster.settle()
    assert group_of(cluster, "a/actor") != group_of(cluster, "a/rollout")
    for number in range(7):
        run_cycle(cluster, number)
    profile = explained(cluster, "a/rollout")["profile"]
    assert profile is not None
    assert abs(profile["duty"] - 0.6) < 0.05
    assert abs(profile["period_s"] - 100.0) < 5.0
    assert group_of(cluster, "a/actor") == group_of(cluster, "a/rollout")


def test_a_rollout_without_syncs_has_a_cycle_for_each_generation() -> None:
    cluster = FakeCluster(policy=PLANNED)
    cluster.start_node(gpus=2)
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout", workers=2, shares=True)
    for number in range(6):
        cluster.submit(f"g{number}", "a/rollout", "generate")
        until_it_runs(cluster, f"g{number}")
        cluster.now += 25.0
        execute(cluster, f"g{number}")
        cluster.pass_time(75.0)
    profile = explained(cluster, "a/rollout")["profile"]
    assert profile is not None
    assert abs(profile["duty"] - 0.25) < 0.02


def test_a_rollout_and_a_trainer_run_in_turns() -> None:
    cluster = full_cluster(shares=True)
    other = next(
        x for x in ("a/r0", "a/r1") if group_of(cluster, x) == group_of(cluster, "b/actor")
    )
    for number in range(3):
        cluster.submit(f"generate{number}", other, "generate")
        cluster.submit(f"step{number}", "b/actor", "forward_backward")
        cluster.settle()
        assert cluster.state_of(f"generate{number}") == "finished"
        assert cluster.state_of(f"step{number}") == "finished"


def test_a_burst_of_overlapping_generations_ends_at_its_bound_if_others_wait() -> None:
    """Generations are never interrupted, and no new one begins after the bound."""
    cluster = full_cluster(shares=True)
    other = next(
        x for x in ("a/r0", "a/r1") if group_of(cluster, x) == group_of(cluster, "b/actor")
    )
    cluster.submit("g0", other, "generate")
    until_it_runs(cluster, "g0")
    cluster.submit("g1", other, "generate")
    cluster.submit("step", "b/actor", "forward_backward")
    assert {run.operation for run in cluster.runs} == {"g0", "g1"}
    cluster.now += cluster.config.burst_max_s + 1.0
    cluster.submit("g2", other, "generate")
    assert {run.operation for run in cluster.runs} == {"g0", "g1"}
    execute(cluster, "g0")
    execute(cluster, "g1")
    until_it_runs(cluster, "step")
    assert cluster.state_of("g2") == "pending"
    cluster.settle()
    assert cluster.state_of("g2") == "finished"


def test_the_same_rollout_may_be_created_again_with_the_same_settings() -> None:
    cluster = full_cluster(shares=True)
    before = group_of(cluster, "a/r0")
    cluster.deploy("a/r0", kind="rollout", workers=2, shares=True)
    assert group_of(cluster, "a/r0") == before
