"""Demand of asynchronous jobs: what the profiler measures when rollouts and trainer overlap."""

import pytest

from plexrl.scheduler.queries.views import usage_view
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.wire.messages.views import PlacedDeploymentView, ProfileView
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.jobs.asynchronous_job import AsynchronousJob, Clock

FORWARD_BACKWARD_S, OPTIM_STEP_S, PUBLISH_S, PULL_S = 16.0, 3.0, 1.0, 2.0
TRAIN_S = FORWARD_BACKWARD_S + OPTIM_STEP_S + PUBLISH_S
TRAINER_GPUS = 4


def start(
    clock: Clock,
    name: str,
    staleness: int,
    rollout_s: float,
    *,
    slo: float | None = None,
    declared: DemandTrace | None = None,
    **fields: bool,
) -> AsynchronousJob:
    """A job whose rollouts generate a batch in `rollout_s` together."""
    cluster = clock.cluster
    cluster.job(name, slo=slo)
    cluster.deploy(f"{name}/actor", workers=TRAINER_GPUS, trace=declared)
    clock.takes(
        f"{name}/actor",
        forward_backward=FORWARD_BACKWARD_S,
        optim_step=OPTIM_STEP_S,
        publish=PUBLISH_S,
    )
    job = AsynchronousJob(clock=clock, name=name, staleness=staleness, **fields)
    for rollout, skew in enumerate(job.skews):
        cluster.deploy(f"{name}/r{rollout}", "rollout", workers=1)
        clock.takes(f"{name}/r{rollout}", generate=skew * rollout_s, sync_weights=PULL_S)
    job.start()
    return job


def cluster_of(nodes: int, **changes: object) -> Clock:
    cluster = FakeCluster(snapshot_operations=1000, **changes)
    for number in range(nodes):
        cluster.join_node(node=f"n{number}")
    cluster.join_router()
    return Clock(cluster)


def profile(cluster: FakeCluster, job: str) -> ProfileView:
    found = placed(cluster, job)["profile"]
    assert found is not None, f"{job} has no profile"
    return found


def placed(cluster: FakeCluster, job: str) -> PlacedDeploymentView:
    """What `explain` says of the job's trainer."""
    return cluster.core.explain_job(job, cluster.now)["deployments"][0]


CASES = [
    # Strict alternation: the rollouts wait for the step, the step for the slowest rollout.
    (0, 60.0, 60.0 + TRAIN_S + PULL_S),
    # The rollouts generate all the time but for their pulls; the trainer waits for them.
    (1, 60.0, 60.0 + PULL_S),
    (3, 60.0, 60.0 + PULL_S),
    # The trainer trains all the time.
    (1, 10.0, TRAIN_S),
    (3, 10.0, TRAIN_S),
]


@pytest.mark.parametrize(("staleness", "rollout_s", "period_s"), CASES)
def test_the_profile_is_one_step_whatever_the_staleness(
    staleness: int, rollout_s: float, period_s: float
) -> None:
    clock = cluster_of(2)
    job = start(clock, "a", staleness, rollout_s)
    clock.run_until(clock.cluster.now + 1000.0)
    found = profile(clock.cluster, "a")
    assert found["period_s"] == pytest.approx(period_s)
    assert found["busy_s"] == pytest.approx(TRAIN_S)
    assert found["duty"] == pytest.approx(TRAIN_S / period_s)
    # What the profile predicts for a step is what a step was billed.
    billed = sum(
        row["gpu_seconds"]
        for row in usage_view(clock.cluster.core.cluster.state, None)
        if row["kind"] in ("forward_backward", "optim_step", "publish")
    )
    assert billed / job.trained == pytest.approx(found["busy_s"] * TRAINER_GPUS, rel=0.1)


@pytest.mark.parametrize(("staleness", "rollout_s", "period_s"), CASES)
def test_syncs_with_publishes_of_their_own_leave_one_cycle_in_each_step(
    staleness: int, rollout_s: float, period_s: float
) -> None:
    clock = cluster_of(2)
    start(clock, "a", staleness, rollout_s, pushes=False)
    clock.run_until(clock.cluster.now + 1000.0)
    found = profile(clock.cluster, "a")
    more_s = 2 * PUBLISH_S
    assert found["busy_s"] == pytest.approx(TRAIN_S + more_s)
    assert period_s <= found["period_s"] <= period_s + more_s


def test_two_jobs_that_wait_for_their_rollouts_share_a_group_without_loss() -> None:
    alone, shared = cluster_of(3), cluster_of(3)
    start(alone, "a", 3, 60.0)
    alone.run_until(alone.cluster.now + 1500.0)
    for name in ("a", "b"):
        start(shared, name, 3, 60.0)
    shared.run_until(shared.cluster.now + 1500.0)
    views = [placed(shared.cluster, name) for name in ("a", "b")]
    assert views[0]["group"] == views[1]["group"]
    for name, view in zip("ab", views, strict=True):
        waiting_part = view["waiting_part"]
        assert waiting_part is not None
        assert waiting_part <= 0.05
        assert shared.steps[f"{name}/actor"] >= 0.95 * alone.steps["a/actor"]
        # Their batches are ready at the same times: one waits, within its slack, at every step.
        assert profile(shared.cluster, name)["period_s"] == pytest.approx(60.0 + PULL_S, rel=0.02)


def test_a_job_that_trains_all_the_time_is_moved_away_from_its_co_resident() -> None:
    clock = cluster_of(4)
    start(clock, "a", 3, 10.0)
    clock.run_until(clock.cluster.now + 500.0)
    start(clock, "b", 3, 60.0)
    clock.run_until(clock.cluster.now + 2000.0)
    views = {name: placed(clock.cluster, name) for name in ("a", "b")}
    assert views["a"]["group"] != views["b"]["group"]
    assert [views["a"]["waiting_part"], views["b"]["waiting_part"]] == pytest.approx([0.0, 0.0])
    assert "of its time, the bound is 30%" in views["a"]["moved_because"]


@pytest.mark.parametrize(
    "bounds", [(None, None), pytest.param((0.05, None), marks=pytest.mark.slow), (0.5, 0.04)]
)
def test_the_job_furthest_past_its_own_bound_is_moved(
    bounds: tuple[float | None, float | None],
) -> None:
    """Both declare less than they train, so that they share at first, and wait for each other for
    less than the cluster's bound."""
    little = DemandTrace(period_s=100.0, segments=(Segment(offset_s=0.0, duration_s=1.0),))
    clock = cluster_of(4)
    for name, rollout_s, slo in zip("ab", (60.0, 30.0), bounds, strict=True):
        start(clock, name, 0, rollout_s, slo=slo, declared=little)
    before = {name: placed(clock.cluster, name)["group"] for name in "ab"}
    assert before["a"] == before["b"]
    clock.run_until(clock.cluster.now + 3000.0)
    moved = {name: placed(clock.cluster, name)["moves"] for name in "ab"}
    tight = {name for name, slo in zip("ab", bounds, strict=True) if slo is not None and slo < 0.1}
    assert {name for name, count in moved.items() if count} == tight
    for name, slo in zip("ab", bounds, strict=True):
        waits = placed(clock.cluster, name)["waiting_part"]
        assert waits is not None
        assert waits <= (0.3 if slo is None else slo)


def test_without_another_group_explain_names_who_holds_it() -> None:
    clock = cluster_of(3)
    for name, rollout_s in (("a", 10.0), ("b", 60.0)):
        start(clock, name, 3, rollout_s)
    seen = set()
    for _ in range(200):
        clock.run_until(clock.cluster.now + 7.0)
        seen.add(clock.cluster.core.explain_job("a", clock.cluster.now)["summary"].split(" ", 1)[1])
    assert "waits: b/actor is in the middle of its burst" in seen
    # A pull of a version that is published does not wait for the trainer.
    assert not any("not published yet" in each for each in seen)
