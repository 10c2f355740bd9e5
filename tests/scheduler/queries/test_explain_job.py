"""Explanations name the rule that causes a wait; estimates are compared with the real start."""

import sys
from collections.abc import Callable
from random import Random
from types import FrameType

from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.dispatch.candidates.readiness import queued_s
from plexrl.scheduler.state.demand.wait_intervals import ERRORS_MIN
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.messages.views import ExplanationView
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster


def cluster_of(gpus: int = 2, **changes: object) -> FakeCluster:
    cluster = FakeCluster(**changes)
    cluster.start_node(gpus)
    return cluster


def submit(cluster: FakeCluster, job: str, **fields: object) -> None:
    cluster.job(job, **fields)
    cluster.deploy(f"{job}/actor")


def count_calls(work: Callable[[], object]) -> int:
    """Number of Python and built-in calls that `work` makes."""
    count = 0

    def count_one(frame: FrameType, event: str, detail: object) -> None:
        nonlocal count
        del frame, detail
        count += event in ("call", "c_call")

    former = sys.getprofile()
    sys.setprofile(count_one)
    try:
        work()
    finally:
        sys.setprofile(former)
    return count


def rules(cluster: FakeCluster, job: str) -> list[str]:
    rows = cluster.core.explain_job(job, cluster.now)["operations"]
    return [str(row["rule"]) for row in rows]


def summary(cluster: FakeCluster, job: str) -> str:
    return str(cluster.core.explain_job(job, cluster.now)["summary"])


def test_a_waiting_job_reports_its_position_and_the_failed_modes() -> None:
    cluster = cluster_of(policy="isolated")
    for job in ("a", "b", "c"):
        submit(cluster, job)
        cluster.submit(f"{job}:1", f"{job}/actor", "barrier")
    assert rules(cluster, "b") == ["capacity"]
    assert rules(cluster, "c") == ["turn"]
    assert "1 of the 1 others that wait have a higher priority" in summary(cluster, "c")
    assert "0 GPUs are in no group, 2 of one kind are wanted" in summary(cluster, "c")


def test_the_cost_of_a_poll_does_not_grow_with_the_backlog() -> None:
    def steps_of_a_poll(backlog: int) -> int:
        cluster = cluster_of(policy="isolated")
        submit(cluster, "holder")
        for index in range(backlog):
            submit(cluster, f"j{index:04}", gang=index % 2, expected_s=float(index))
        last = f"j{backlog - 1:04}"
        cluster.submit(f"{last}:1", f"{last}/actor", "barrier")
        return count_calls(lambda: cluster.core.operation_view(f"{last}:1", cluster.now))

    assert steps_of_a_poll(200) < 2 * steps_of_a_poll(20)


def test_a_waiting_job_reports_when_declared_lengths_free_gpus() -> None:
    cluster = cluster_of(policy="isolated")
    submit(cluster, "a", expected_s=500.0)
    submit(cluster, "b")
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.pass_time(100.0)
    explanation = cluster.explanation_of("b:1")
    assert explanation["eta_s"] == 400.0


def test_a_declared_length_counts_from_the_first_gpus_and_is_never_over_while_the_job_runs() -> (
    None
):
    cluster = cluster_of(policy="isolated")
    submit(cluster, "first", expected_s=300.0)
    submit(cluster, "a", expected_s=500.0)
    cluster.pass_time(300.0)
    cluster.send(ev.JobFinished(job="first", outcome="completed"))
    submit(cluster, "b")
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.pass_time(100.0)
    assert cluster.explanation_of("b:1")["eta_s"] == 400.0
    cluster.pass_time(500.0)
    # It has lasted 600 s, and is expected to last half as long again.
    assert cluster.explanation_of("b:1")["eta_s"] == 300.0


def test_an_incomplete_gang_and_a_quota_are_explained() -> None:
    cluster = cluster_of(4)
    submit(cluster, "a", gang=2)
    cluster.submit("a:1", "a/actor", "barrier")
    assert rules(cluster, "a") == ["gang"]
    assert "gang of 2 has 1" in summary(cluster, "a")


def test_each_operation_of_a_running_job_is_explained() -> None:
    cluster = cluster_of()
    submit(cluster, "a")
    submit(cluster, "b")
    cluster.submit("a:0", "a/actor", "barrier")
    assert rules(cluster, "a") == ["launching"]
    cluster.settle()
    for index in (1, 2):
        cluster.submit(f"a:{index}", "a/actor", "barrier")
    cluster.submit("b:1", "b/actor", "barrier")
    assert rules(cluster, "a") == ["running", "order"]
    assert rules(cluster, "b") == ["burst"]
    # Errors of waits for the group say nothing of a wait for the job's own work.
    behind = cluster.core.explain_job("a", cluster.now)["operations"][1]
    assert behind["eta_s"] is not None
    assert (behind["eta_low_s"], behind["eta_high_s"]) == (None, None)
    assert summary(cluster, "a") == "it runs"
    assert summary(cluster, "b").startswith("b:1 waits:")
    rows = cluster.core.explain_job("b", cluster.now)["operations"]
    assert (rows[0]["holder"], rows[0]["position"]) == ("a/actor", 0)
    assert rows[0]["eta_s"] is not None
    assert rows[0]["eta_s"] > 0
    assert rows[0]["eta_low_s"] is not None
    while not any(run.kind.value == "offload" for run in cluster.runs):
        cluster.pass_time(0.1)
        if cluster.runs and cluster.runs[0].kind.value == "barrier":
            cluster.execute(cluster.runs[0])
    assert rules(cluster, "b") == ["switch"]
    cluster.settle()
    assert summary(cluster, "b") == "it waits for its controller's next operation"


def test_a_burst_beyond_its_usual_length_is_given_no_end_but_its_bound() -> None:
    cluster = cluster_of(burst_max_s=100.0, burst_interruptions=1000.0)
    for job in ("a", "b"):
        submit(cluster, job)
    cluster.settle()
    for index in range(3):
        cluster.submit(f"b:before-{index}", "b/actor", "barrier")
        cluster.settle()
        cluster.submit(f"a:{index}", "a/actor", "barrier")
        while all(run.operation != f"a:{index}" for run in cluster.runs):
            for run in cluster.runs:
                cluster.execute(run)
            cluster.pass_time(0.1)
        cluster.pass_time(2.0)
        cluster.settle()
    cluster.submit("a:3", "a/actor", "barrier")
    cluster.submit("b:1", "b/actor", "barrier")
    before = cluster.explanation_of("b:1")
    assert before["eta_s"] is not None
    assert "longer than usual" not in before["reason"]
    # The controller submits each operation before the one before it ends.
    for index in range(4, 8):
        cluster.submit(f"a:{index}", "a/actor", "barrier")
        cluster.pass_time(10.0)
        cluster.execute(cluster.runs[0])
    passed = cluster.explanation_of("b:1")
    assert passed["rule"] == "burst"
    assert passed["eta_s"] is None
    assert "s longer than usual; it yields in 58 s at the latest" in passed["reason"]


def test_estimated_starts_are_compared_with_real_ones() -> None:
    cluster = cluster_of()
    for job in ("a", "b"):
        submit(cluster, job)
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    assert cluster.core.explain_job("b", cluster.now)["eta_quality"]["estimates"] == 0
    cluster.submit("a:1", "a/actor", "barrier")
    cluster.submit("b:1", "b/actor", "barrier")
    promised_s = cluster.explanation_of("b:1")["eta_s"]
    asked_at = cluster.now
    cluster.pass_time(30.0)
    cluster.settle()
    started_at = cluster.core.operation_view("b:1", cluster.now)["started_at"]
    quality = cluster.core.explain_job("b", cluster.now)["eta_quality"]
    assert started_at is not None
    assert promised_s is not None
    late_s = started_at - asked_at - promised_s
    assert late_s > 25.0
    assert quality["estimates"] == 1
    assert quality["mean_error_s"] is not None
    assert abs(quality["mean_error_s"] - late_s) < 1e-9
    assert quality["mean_late_s"] == quality["mean_error_s"]
    assert quality["slipped"] == 1
    assert (quality["early"], quality["late"]) == (0, 1)
    assert quality["ratios"]["+Inf"] == 1
    assert quality["ratios"]["1.25"] == 0


def both_submit(cluster: FakeCluster, index: int) -> ExplanationView:
    """Two jobs submit at the same time; returns the explanation of the one that waits longer."""
    names = [f"{job}:{index}" for job in ("a", "b")]
    for name in names:
        cluster.submit(name, f"{name[0]}/actor", "forward")
    waits = [each for each in map(cluster.explanation_of, names) if each["rule"] != "running"]
    return max(waits, key=lambda each: each["eta_s"] or 0.0)


def test_the_interval_comes_from_recent_errors_and_survives_a_restart() -> None:
    cluster = cluster_of()
    for job in ("a", "b"):
        submit(cluster, job)
    cluster.settle()
    both_submit(cluster, 0)
    cluster.settle()
    cold = both_submit(cluster, 1)
    assert cold["eta_s"]
    assert (cold["eta_low_s"], cold["eta_high_s"]) == (cold["eta_s"] / 2, cold["eta_s"] * 2)
    chance = Random(1)
    for index in range(2, 40):
        cluster.pass_time(chance.uniform(1.0, 4.0))
        cluster.settle()
        both_submit(cluster, index)
    cluster.pass_time(1.0)
    cluster.settle()
    quality = cluster.core.explain_job("b", cluster.now)["eta_quality"]
    assert quality["estimates"] > ERRORS_MIN
    # The scheduler replays its journal to the same state, and then goes on from its snapshot.
    cluster.restart_scheduler(restored=True)
    assert cluster.core.explain_job("b", cluster.now)["eta_quality"] == quality
    cluster.settle()
    known = both_submit(cluster, 40)
    assert known["eta_s"]
    assert known["eta_low_s"] is not None
    assert known["eta_high_s"] is not None
    assert known["eta_low_s"] < known["eta_high_s"]
    assert (known["eta_low_s"], known["eta_high_s"]) != (known["eta_s"] / 2, known["eta_s"] * 2)


def test_a_poll_costs_the_same_however_long_the_queue_is() -> None:
    def polled(depth: int) -> int:
        cluster = cluster_of(residents_max=4)
        for job in ("a", "b"):
            submit(cluster, job)
        cluster.settle()
        for number in range(depth):
            cluster.now += 0.001
            for job in ("a", "b"):
                cluster.submit(f"{job}:{number}", f"{job}/actor", "forward_backward")
        last = f"b:{depth - 1}"
        assert cluster.explanation_of(last)["position"] == depth - 1
        # Behind the holder's queue, and behind its own.
        view = cluster.core.operation_view
        return count_calls(lambda: view(OperationId(last), cluster.now))

    few, many = polled(64), polled(256)
    # The place in the queue takes some more steps of a bisection.
    assert many <= few + 32


def test_a_queue_beyond_the_look_ahead_is_estimated_by_the_mean_of_its_first_part() -> None:
    cluster = cluster_of()
    submit(cluster, "a")
    cluster.settle()
    for number in range(100):
        kind = ("forward_backward", "optim_step")[number % 2]
        cluster.now += 0.001
        cluster.submit(f"a:{number}", "a/actor", kind)
    deployment = cluster.core._context.state.deployments[DeploymentId("a/actor")]
    deployment.demand.estimates.seconds_by_kind.update(
        {OperationKind.FORWARD_BACKWARD: 3.0, OperationKind.OPTIM_STEP: 1.0}
    )
    state = cluster.core._context.state
    assert [queued_s(state, deployment, count) for count in (0, 1, 2, 32, 98)] == [
        *(0.0, 3.0, 4.0, 64.0, 196.0)
    ]
