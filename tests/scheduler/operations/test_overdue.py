"""Workers of runs that never end are replaced; those of slow runs are left alone."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from plexrl.ids import DeploymentId
from plexrl.scheduler.operations.deadlines.bounds import FACTOR, FIRST_FACTOR
from plexrl.scheduler.operations.deadlines.overdue import find_overrun, overdue_view
from plexrl.scheduler.queries.views import STARTS_NAMED, restarting
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster

LEAST_S = 100.0
FIRST_S = FIRST_FACTOR * LEAST_S


def running(jobs: tuple[str, ...] = ("a",), **changes: object) -> FakeCluster:
    """A cluster whose jobs share one group, and have run each kind of operation once."""
    cluster = FakeCluster(**{"operation_overdue_s": LEAST_S, **changes})
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t"))
    for job in jobs:
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=4)
        cluster.submit(f"{job}:0", f"{job}/actor", "optim_step")
    cluster.settle()
    return cluster


def incarnation(cluster: FakeCluster, name: str = "a/actor") -> int:
    return cluster.core.deployment_view(name, cluster.now)["incarnation"]


def hang(cluster: FakeCluster, seconds: float) -> None:
    """Time passes, and no worker reports anything."""
    cluster.pass_time(seconds)
    cluster.runs = [run for run in cluster.runs if not cluster.is_out_of_date(run)]


def hang_until_replaced(cluster: FakeCluster, name: str = "a/actor") -> float:
    """Nothing is reported until the workers are ended; returns after how long they are."""
    processes = cluster.core._context.state.deployments[DeploymentId(name)].wpg.processes
    before, began_at = processes.overruns, cluster.now
    while processes.overruns == before:
        hang(cluster, LEAST_S / 10)
        assert cluster.now < began_at + 1e6, "it hangs for ever"
    return cluster.now - began_at


def test_the_workers_of_an_operation_that_never_ends_are_replaced_and_repeat_it() -> None:
    cluster = running()
    cluster.submit("a:1", "a/actor", "optim_step")
    before = incarnation(cluster)
    hang(cluster, LEAST_S + 1)
    assert incarnation(cluster) == before + 1
    assert cluster.state_of("a:1") == "pending"
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1"]


def test_an_early_look_sets_no_more_timers() -> None:
    """Each would set another one, for as long as something runs."""
    cluster = running()
    # Its bound is longer than the time until the first look.
    cluster.submit("a:1", "a/actor", "forward")
    timers = cluster.core._context.effects.timers
    before = len(timers)
    step = cluster.core._context.step(cluster.now + LEAST_S / 2)
    assert find_overrun(step, DeploymentId("a/actor")) is None
    assert len(timers) == before


def test_a_hung_operation_does_not_keep_other_members_from_the_group() -> None:
    cluster = running(("a", "b"))
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("b:1", "b/actor", "optim_step")
    while "a:1" not in {run.operation for run in cluster.runs}:
        cluster.execute(cluster.runs[0])
    cluster.runs = [run for run in cluster.runs if run.operation != "a:1"]
    hang(cluster, FIRST_S + 1)
    cluster.settle()
    assert cluster.state_of("b:1") == cluster.state_of("a:1") == "finished"


@pytest.mark.parametrize("kind", ["load", "offload"])
def test_a_move_that_never_ends_is_tried_again_and_never_fails_its_job(kind: str) -> None:
    cluster = running(("a", "b"), launch_attempts=1)
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("b:1", "b/actor", "optim_step")
    hung = 0
    for _ in range(40):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.runs and cluster.runs[0].kind.value == kind and hung < 4:
            hang_until_replaced(cluster, cluster.runs.pop(0).deployment)
            hung += 1
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
    cluster.settle()
    assert hung
    assert cluster.state_of("a:1") == cluster.state_of("b:1") == "finished"


def test_an_operation_that_hangs_each_time_fails_its_job_after_ever_longer_bounds() -> None:
    cluster = running(launch_attempts=3)
    cluster.submit("a:1", "a/actor", "optim_step")
    lengths = []
    for _ in range(4):
        while cluster.launches or (cluster.runs and cluster.runs[0].operation != "a:1"):
            if cluster.launches:
                cluster.launch(cluster.launches[0])
            else:
                cluster.execute(cluster.runs[0])
        lengths.append(hang_until_replaced(cluster))
    job = cluster.core.job_view("a", cluster.now)
    assert job["state"] == "FAILED"
    assert "did not end" in job["reason"]
    assert [round(each / LEAST_S) for each in lengths] == [1, 2, 4, 8]


def test_a_start_of_processes_that_never_ends_is_repeated() -> None:
    cluster = running()
    cluster.kill("a/actor")
    before = incarnation(cluster)
    cluster.launches.clear()
    hang(cluster, FIRST_S + LEAST_S)
    assert incarnation(cluster) == before + 1
    cluster.settle()


def test_the_bound_and_the_estimate_of_a_repetition_count_from_its_own_start() -> None:
    cluster = running()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.settle()
    hang(cluster, 2 * LEAST_S)
    cluster.kill("a/actor")
    cluster.submit("a:2", "a/actor", "optim_step")
    while not any(run.replay for run in cluster.runs):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        else:
            cluster.execute(cluster.runs[0])
    before = incarnation(cluster)
    assert cluster.explanation_of("a:2")["rule"] != "overdue"
    hang(cluster, 0.9 * LEAST_S)
    assert incarnation(cluster) == before
    hang(cluster, 0.2 * LEAST_S)
    assert incarnation(cluster) == before + 1
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]


def test_a_bound_counts_from_the_time_at_which_reports_can_arrive_again() -> None:
    cluster = running()
    cluster.submit("a:1", "a/actor", "optim_step")
    before = incarnation(cluster)
    cluster.lose_router()
    hang(cluster, 3 * LEAST_S)
    cluster.join_router()
    hang(cluster, 0.9 * LEAST_S)
    assert incarnation(cluster) == before, "it may have ended, and nobody could report it"
    hang(cluster, LEAST_S)
    assert incarnation(cluster) == before + 1


@pytest.mark.parametrize("restored", [False, True])
def test_a_restarted_scheduler_still_notices_what_hangs(restored: bool) -> None:
    cluster = running()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.now += 5 * LEAST_S
    before = incarnation(cluster)
    cluster.restart_scheduler(restored=restored)
    hang(cluster, 0.5 * LEAST_S)
    assert incarnation(cluster) == before
    hang(cluster, LEAST_S)
    assert incarnation(cluster) == before + 1


def test_an_overdue_operation_is_named_before_its_workers_are_replaced() -> None:
    cluster = running()
    cluster.submit("a:1", "a/actor", "optim_step")
    sent_at = cluster.now
    hang(cluster, 0.4 * LEAST_S)
    assert (
        overdue_view(
            cluster.core.cluster,
            cluster.now,
        )
        == []
    )
    hang(cluster, 0.2 * LEAST_S)
    (found,) = overdue_view(
        cluster.core.cluster,
        cluster.now,
    )
    assert (found["deployment"], found["operation"]) == ("a/actor", "a:1")
    assert found["expected_at"] == pytest.approx(sent_at + 0.1)
    assert found["replaced_at"] == sent_at + LEAST_S
    cluster.execute(cluster.runs[0])
    assert (
        overdue_view(
            cluster.core.cluster,
            cluster.now,
        )
        == []
    )


def test_workers_that_start_again_and_again_are_named_until_an_operation_completes() -> None:
    cluster = running(launch_attempts=100)
    cluster.submit("a:1", "a/actor", "optim_step")
    submitted_at = cluster.now
    cluster.pass_time(1.0)
    for _ in range(STARTS_NAMED):
        assert restarting(cluster.core.cluster.state) == []
        cluster.kill("a/actor")
        cluster.launch(cluster.launches[0])
    cluster.kill("a/actor")
    ((text, since),) = restarting(cluster.core.cluster.state)
    assert since == submitted_at
    assert text == f"a/actor (start {STARTS_NAMED + 1}): rank 0: killed"
    cluster.settle()
    assert restarting(cluster.core.cluster.state) == []


def test_an_estimate_that_has_passed_is_not_repeated() -> None:
    cluster = running(("a", "b"))
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.submit("b:1", "b/actor", "optim_step")
    while "a:1" not in {run.operation for run in cluster.runs}:
        cluster.execute(cluster.runs[0])
    hang(cluster, 40.0)
    for name, rule in (("a:1", "running"), ("a:2", "overdue"), ("b:1", "overdue")):
        told = cluster.explanation_of(name)
        assert told["rule"] == rule
        assert told["eta_s"] is None, f"{name}: {told}"
        assert "overdue for 40 s" in told["reason"]
        assert "replaced in 60 s" in told["reason"]


def test_a_first_run_is_of_unknown_length_and_not_late() -> None:
    cluster = running(("a", "b"))
    cluster.submit("a:1", "a/actor", "forward")
    cluster.submit("a:2", "a/actor", "forward")
    cluster.submit("b:1", "b/actor", "optim_step")
    while "a:1" not in {run.operation for run in cluster.runs}:
        cluster.execute(cluster.runs[0])
    began_at = cluster.now
    hang(cluster, 40.0)
    for name, rule in (("a:1", "running"), ("a:2", "order"), ("b:1", "burst")):
        told = cluster.explanation_of(name)
        assert (told["rule"], told["eta_s"]) == (rule, None)
        assert "overdue" not in told["reason"]
    assert "not known yet" in cluster.explanation_of("a:1")["reason"]
    # The condition comes from the bound, and invents no expected end.
    hang(cluster, 0.6 * FIRST_S)
    (found,) = overdue_view(cluster.core.cluster, cluster.now)
    assert (found["began_at"], found["expected_at"]) == (began_at, None)


def test_a_first_load_builds_the_model_and_is_of_unknown_length() -> None:
    cluster = FakeCluster(operation_overdue_s=LEAST_S)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.launch(cluster.launches[0])
    assert [run.kind.value for run in cluster.runs] == ["load"]
    hang(cluster, 40.0)
    told = cluster.explanation_of("a:1")
    assert told["eta_s"] is None
    assert "overdue" not in told["reason"]


def test_a_start_of_processes_has_no_expected_end() -> None:
    cluster = running()
    cluster.kill("a/actor")
    cluster.launches.clear()
    hang(cluster, 0.6 * FIRST_S)
    (found,) = overdue_view(cluster.core.cluster, cluster.now)
    assert (found["kind"], found["expected_at"]) == ("launch", None)


def test_without_the_setting_nothing_is_replaced_and_no_timer_is_set() -> None:
    cluster = running(operation_overdue_s=0.0)
    cluster.submit("a:1", "a/actor", "optim_step")
    before = incarnation(cluster)
    hang(cluster, 1e6)
    assert incarnation(cluster) == before
    assert (
        overdue_view(
            cluster.core.cluster,
            cluster.now,
        )
        == []
    )
    assert "overdue for 1000000 s" in cluster.explanation_of("a:1")["reason"]


@given(
    st.lists(st.floats(0.01, 1e5), min_size=1, max_size=8),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_a_deadline_never_fires_for_an_operation_within_its_estimate(
    durations: list[float], part: float
) -> None:
    """The first run has the bound of unknown kinds; each later one the tenfold of the slowest one,
    as far as it is remembered."""
    cluster = running(snapshot_operations=1000, snapshot_work_s=1e9)
    before, slowest = incarnation(cluster), 0.1
    for index, duration_s in enumerate(durations):
        longest_s = max(LEAST_S, FACTOR * slowest)
        taken_s = min(duration_s, longest_s * (0.99 if part > 0.99 else part))
        cluster.submit(f"x{index}", "a/actor", "optim_step")
        (run,) = cluster.runs
        cluster.pass_time(taken_s)
        assert incarnation(cluster) == before, f"killed after {taken_s} s of {longest_s}"
        cluster.compute_s = taken_s
        cluster.execute(run)
        # It is forgotten slowly.
        slowest = max(0.98 * slowest, taken_s)


def test_one_timer_serves_all_runs_of_a_deployment() -> None:
    cluster = running()
    for index in range(20):
        cluster.submit(f"x{index}", "a/actor", "forward")
        cluster.settle()
    timers = cluster.core._context.effects.timers
    assert len([at for at, what in timers if what.kind == "overdue"]) == 1
