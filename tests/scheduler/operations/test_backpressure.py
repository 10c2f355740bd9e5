"""Limits of deployments and tenants, the reported retry time, and the latency breakdown."""

import pytest

from plexrl import errors
from plexrl.ids import DeploymentId
from plexrl.scheduler.operations.submission.backpressure import retry_after_s
from plexrl.scheduler.queries.views import operation_log
from plexrl.scheduler.state.messages.calls import ListOperations
from tests.scheduler.fake_cluster import FakeCluster

MB = 1 << 20


def cluster_with(**changes: object) -> FakeCluster:
    made = FakeCluster(**changes)
    made.start_node()
    for job in ("a", "b"):
        made.job(job)
        made.deploy(f"{job}/actor")
    made.settle()
    return made


def refusal(cluster: FakeCluster, operation: str, deployment: str, **fields: object) -> object:
    with pytest.raises(errors.OverloadedError) as caught:
        cluster.submit(operation, deployment, "barrier", **fields)
    with pytest.raises(errors.UnknownOperationError):
        cluster.state_of(operation)
    assert float(str(caught.value.details["retry_after_s"])) > 0
    return caught.value.details["bound"]


def test_a_full_queue_refuses_and_goes_on_once_there_is_room() -> None:
    cluster = cluster_with(pending_operations_max=2)
    for number in range(3):
        cluster.submit(f"a:{number}", "a/actor", "barrier")
        if number == 0:
            cluster.execute(cluster.runs[0])
    assert refusal(cluster, "a:3", "a/actor") == "pending_operations_max"
    cluster.submit("b:0", "b/actor", "barrier")
    cluster.settle()
    cluster.submit("a:3", "a/actor", "barrier")
    cluster.settle()
    names = ("a:0", "a:1", "a:2", "a:3", "b:0")
    assert {cluster.state_of(name) for name in names} == {"finished"}


def test_a_tenant_is_bounded_over_all_its_deployments() -> None:
    cluster = cluster_with(tenant_operations_max=2)
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.submit("b:0", "b/actor", "barrier")
    assert refusal(cluster, "a:1", "a/actor") == "tenant_operations_max"
    cluster.settle()
    cluster.submit("a:1", "a/actor", "barrier")


@pytest.mark.parametrize("bound", ["deployment_payload_bytes_max", "tenant_payload_bytes_max"])
def test_payloads_are_bounded_but_a_large_one_goes_alone(bound: str) -> None:
    cluster = cluster_with(**{bound: 10 * MB})
    cluster.submit("a:0", "a/actor", "barrier", payload="p0", payload_bytes=25 * MB)
    assert refusal(cluster, "a:1", "a/actor", payload="p1", payload_bytes=1) == bound
    cluster.submit("a:2", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "barrier", payload="p1", payload_bytes=6 * MB)
    cluster.submit("a:3", "a/actor", "barrier", payload="p3", payload_bytes=4 * MB)
    assert refusal(cluster, "a:4", "a/actor", payload="p4", payload_bytes=1) == bound


def test_the_refused_are_told_the_pace_of_the_queue() -> None:
    cluster = cluster_with(pending_operations_max=1)
    cluster.submit("a:w", "a/actor", "barrier")
    cluster.settle()
    for number in range(12):
        cluster.submit(f"a:{number}", "a/actor", "barrier")
        cluster.pass_time(3.0)
        cluster.execute(cluster.runs[0])
    cluster.submit("a:x", "a/actor", "barrier")
    cluster.submit("a:y", "a/actor", "barrier")
    with pytest.raises(errors.OverloadedError) as caught:
        cluster.submit("a:z", "a/actor", "barrier")
    assert caught.value.details["retry_after_s"] == pytest.approx(3.0, rel=0.1)


def test_the_newest_pace_counts_for_a_quarter_and_the_bytes_that_are_missing_for_whole_ends() -> (
    None
):
    cluster = cluster_with(deployment_payload_bytes_max=10 * MB)
    in_flight = cluster.core._context.state.deployment(DeploymentId("a/actor")).work.in_flight
    in_flight.gap_s, in_flight.bytes_each = 8.0, 2.0 * MB
    cluster.submit("a:0", "a/actor", "barrier", payload="p0", payload_bytes=6 * MB)
    while cluster.runs[0].kind.value != "barrier":
        cluster.execute(cluster.runs[0])
    in_flight.ended_at = cluster.now
    cluster.pass_time(4.0)
    cluster.execute(cluster.runs[0])
    assert (in_flight.gap_s, in_flight.bytes_each) == (7.0, 3.0 * MB)
    assert [retry_after_s(in_flight, missing) for missing in (0, 3 * MB, 3 * MB + 1)] == [7, 7, 14]


def test_an_operation_is_logged_with_where_its_time_went() -> None:
    cluster = cluster_with()
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("b:0", "b/actor", "barrier")
    # Its group is the other's, which is taken off the GPUs before its own state comes on.
    while cluster.state_of("b:0") != "running":
        if cluster.runs:
            cluster.pass_time(2.0)
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(0.5)
    cluster.pass_time(1.0)
    cluster.execute(cluster.runs[0])
    (row,) = [
        row
        for row in operation_log(cluster.core.cluster, None, ListOperations(job="b"), cluster.now)
        if not row["internal"]
    ]
    assert row["started_at"] is not None
    assert row["finished_at"] is not None
    assert row["queue_s"] is not None
    waited_s = row["started_at"] - row["submitted_at"]
    assert row["switch_s"] >= 4.0
    assert row["queue_s"] >= 0.0
    assert row["queue_s"] + row["switch_s"] == pytest.approx(waited_s)
    assert row["finished_at"] - row["started_at"] == pytest.approx(1.0)


def test_the_log_can_be_asked_for_a_deployment_or_a_kind() -> None:
    cluster = cluster_with()
    for name in ("a", "b"):
        cluster.submit(f"{name}:0", f"{name}/actor", "barrier")
        cluster.submit(f"{name}:1", f"{name}/actor", "optim_step")
    cluster.settle()

    def found(**wanted: object) -> list[str]:
        rows = operation_log(cluster.core.cluster, None, ListOperations(**wanted), cluster.now)
        return [row["operation"] for row in rows if not row["internal"]]

    assert found(deployment="a/actor") == ["a:0", "a:1"]
    assert found(kind="barrier", job="b") == ["b:0"]
    assert len(found(kind="optim_step")) == 2
