"""A preemptible deployment uses the idle time of a group, and gives way."""

from typing import Any

import pytest

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.ids import DeploymentId, OperationId
from plexrl.scheduler.dispatch.idle_time import may_fill
from plexrl.scheduler.queries.views import unreferenced_payloads
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster

PAUSE_S = 100.0


def runs(cluster: FakeCluster) -> list[tuple[str, str]]:
    return [(run.kind.value, run.deployment) for run in cluster.runs]


def carry_out(cluster: FakeCluster, kind: str, seconds: float = 1.0) -> Any:
    """Carry out the only run, after so many seconds."""
    (run,) = cluster.runs
    assert run.kind == kind, runs(cluster)
    cluster.pass_time(seconds)
    cluster.compute_s = seconds
    cluster.execute(run)
    return run


def begun(cycles: int = 3, **changes: object) -> FakeCluster:
    """`a` has had bursts of 10 s with pauses of `PAUSE_S`, and `e/batch` shares its group and has
    generated once. Moves take 1 s, except the first load. The last burst of `a` has just ended."""
    cluster = FakeCluster(snapshot_operations=100, **changes)
    cluster.start_node()
    cluster.job("a", tenant="trains")
    cluster.deploy("a/actor")
    cluster.settle()
    cluster.job("e", tenant="evaluates")
    cluster.deploy("e/batch", "rollout", preemptible=True)
    cluster.settle()
    for number in range(cycles):
        if number == 1:
            cluster.submit("g:0", "e/batch", "generate")
            for kind in ("offload", "load", "generate"):
                carry_out(cluster, kind)
            cluster.pass_time(PAUSE_S - 3.0)
        elif number:
            cluster.pass_time(PAUSE_S)
        cluster.submit(f"a:{number}", "a/actor", "optim_step", ends_burst=True)
        while cluster.runs:
            kind = cluster.runs[0].kind.value
            carry_out(cluster, kind, 10.0 if kind == "optim_step" else 1.0)
    return cluster


def generating(cluster: FakeCluster) -> Any:
    """Begin a generation in the present pause."""
    cluster.submit("g", "e/batch", "generate")
    carry_out(cluster, "offload")
    carry_out(cluster, "load")
    (run,) = cluster.runs
    assert (run.kind.value, run.deployment) == ("generate", "e/batch")
    return run


def test_it_runs_in_the_pauses_and_makes_no_group_of_its_own() -> None:
    cluster = begun()
    generating(cluster)
    (group,) = cluster.core.list_groups(cluster.now)
    assert (group["members"], group["fillers"]) == (["a/actor"], ["e/batch"])
    assert cluster.core.deployment_view("e/batch", cluster.now)["preemptible"]


def test_a_member_that_arrives_early_interrupts_it_and_it_continues_from_what_it_has() -> None:
    cluster = begun()
    first = generating(cluster)
    cluster.pass_time(20.0)
    cluster.submit("a:9", "a/actor", "optim_step", ends_burst=True)
    assert (first.operation, first.token) in cluster.interrupted
    assert cluster.explanation_of("a:9")["rule"] == "preemptible"
    carry_out(cluster, "generate", 0.1)
    assert cluster.state_of("g") == "pending"
    assert cluster.explanation_of("g")["rule"] in ("switch", "preemptible")
    carry_out(cluster, "offload")
    carry_out(cluster, "load")
    assert runs(cluster) == [("optim_step", "a/actor")]
    carry_out(cluster, "optim_step", 10.0)
    carry_out(cluster, "offload")
    carry_out(cluster, "load")
    (again,) = cluster.runs
    assert (again.operation, again.partial) == ("g", f"g.{first.token}")
    assert again.token > first.token
    carry_out(cluster, "generate")
    assert cluster.state_of("g") == "finished"


def test_it_leaves_before_the_expected_burst_so_that_the_member_need_not_wait() -> None:
    cluster = begun()
    generating(cluster)
    # 2 s have passed, and the switches back need 2 more.
    cluster.pass_time(PAUSE_S - 5.0)
    assert not cluster.interrupted
    cluster.pass_time(2.0)
    assert cluster.interrupted
    carry_out(cluster, "generate", 0.1)
    carry_out(cluster, "offload", 0.5)
    carry_out(cluster, "load", 0.5)
    assert cluster.runs == []
    (group,) = cluster.core.list_groups(cluster.now)
    assert group["holder"] == "a/actor"
    cluster.submit("a:9", "a/actor", "optim_step")
    assert runs(cluster) == [("optim_step", "a/actor")]


def known_moves(cluster: FakeCluster) -> None:
    """The member's offload takes 1 s and its load 4 s, the filler's 2 s and 3 s."""
    for name, offload_s, load_s in (("a/actor", 1.0, 4.0), ("e/batch", 2.0, 3.0)):
        member = cluster.core._context.state.deployment(DeploymentId(name))
        moves = {OperationKind.OFFLOAD: offload_s, OperationKind.LOAD: load_s}
        member.demand.estimates.seconds_by_kind |= moves


@pytest.mark.parametrize(("due_s", "begins"), [(16.0, True), (15.9, False)])
def test_it_begins_only_if_it_may_work_as_long_as_all_its_moves_take(
    due_s: float, begins: bool
) -> None:
    """1 + 3 s to begin with, 2 s to end with; then the member's load of 4 s and the same 6 s of
    work have room before its burst."""
    cluster = begun()
    known_moves(cluster)
    cluster.pass_time(PAUSE_S - due_s)
    cluster.submit("g", "e/batch", "generate")
    assert runs(cluster) == ([("offload", "a/actor")] if begins else [])


def test_it_leaves_as_early_as_its_offload_and_the_members_load_need() -> None:
    cluster = begun()
    generating(cluster)
    known_moves(cluster)
    # The timer was set for moves of 1 s.
    cluster.submit("g:1", "e/batch", "generate")
    # 2 s of the pause have passed.
    cluster.pass_time(PAUSE_S - 2.0 - 6.5)
    assert not cluster.interrupted
    cluster.pass_time(0.5)
    assert cluster.interrupted


def test_it_does_not_begin_when_a_burst_is_expected_soon() -> None:
    cluster = begun()
    cluster.pass_time(PAUSE_S - 4.0)
    cluster.submit("g", "e/batch", "generate")
    assert cluster.runs == []
    explanation = cluster.explanation_of("g")
    assert explanation["rule"] == "preemptible"
    assert "expected" in explanation["reason"]
    # The member does not come, and after a time is no longer expected.
    cluster.pass_time(2 * PAUSE_S)
    assert runs(cluster) == [("offload", "a/actor")]


def test_a_member_whose_operation_waits_for_another_deployment_is_not_expected() -> None:
    """It is not known when that one ends, so the usual pause says nothing."""
    cluster = begun()
    state = cluster.core.cluster.state
    (group,) = state.groups.values()
    member, filler = (state.deployments[DeploymentId(name)] for name in ("a/actor", "e/batch"))
    step = cluster.core._context.step(cluster.now + PAUSE_S - 2.0)
    assert not may_fill(step, group, filler)
    member.work.enqueue(0, OperationId("waits"))
    assert may_fill(step, group, filler)


def test_a_member_whose_pauses_vary_is_expected_early() -> None:
    cluster = begun(cycles=3)
    for number, pause_s in enumerate((60.0, 140.0, 60.0, 140.0)):
        cluster.pass_time(pause_s)
        cluster.submit(f"v:{number}", "a/actor", "optim_step", ends_burst=True)
        carry_out(cluster, "optim_step", 10.0)
    generating(cluster)
    cluster.pass_time(70.0)
    assert cluster.interrupted, "a pause of 70 s is not unusual"


def test_the_switches_around_it_and_its_work_are_billed_to_its_tenant() -> None:
    cluster = begun()

    def billed() -> tuple[float, float]:
        views = [cluster.core.job_view(job, cluster.now) for job in ("a", "e")]
        return views[0]["gpu_seconds"], views[1]["gpu_seconds"]

    before = billed()
    generating(cluster)
    cluster.pass_time(20.0)
    cluster.submit("a:9", "a/actor", "optim_step", ends_burst=True)
    carry_out(cluster, "generate")
    carry_out(cluster, "offload")
    carry_out(cluster, "load")
    carry_out(cluster, "optim_step", 10.0)
    carry_out(cluster, "offload")
    carry_out(cluster, "load")
    # A fault of the second run takes nothing from the first one.
    cluster.pass_time(30.0)
    cluster.kill("e/batch")
    cluster.settle()
    assert cluster.state_of("g") == "finished"
    trains, evaluates = (now - then for now, then in zip(billed(), before, strict=True))
    assert trains == pytest.approx(2 * 10.0)
    assert evaluates == pytest.approx(2 * (6 * 1.0 + 21.0))


def test_what_was_drawn_is_kept_until_the_operation_ends() -> None:
    cluster = begun()
    first = generating(cluster)
    cluster.submit("a:9", "a/actor", "optim_step", ends_burst=True)
    carry_out(cluster, "generate")
    kept = f"g.{first.token}"
    blobs = [kept, "other.in"]
    assert unreferenced_payloads(cluster.core.cluster.state, blobs) == ["other.in"]
    cluster.settle()
    assert unreferenced_payloads(cluster.core.cluster.state, blobs) == blobs


def test_a_cancelled_generation_is_not_continued() -> None:
    cluster = begun()
    generating(cluster)
    cluster.submit("a:9", "a/actor", "optim_step", ends_burst=True)
    cluster.send(ev.OperationCancelled(operation="g"))
    carry_out(cluster, "generate")
    assert cluster.state_of("g") == "finished"


def test_its_rows_are_not_stopped_one_by_one() -> None:
    cluster = begun()
    generating(cluster)
    with pytest.raises(ConflictError, match="preemptible"):
        cluster.send(ev.OperationCancelled(operation="g", rows=(1,)))


def test_when_the_members_have_left_it_waits_for_another_group() -> None:
    cluster = begun()
    generating(cluster)
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    carry_out(cluster, "generate")
    assert cluster.core.list_groups(cluster.now) == []
    explanation = cluster.explanation_of("g")
    assert explanation["rule"] == "preemptible"
    cluster.job("b")
    cluster.deploy("b/actor")
    cluster.settle()
    assert cluster.state_of("g") == "finished"


def test_its_group_takes_as_many_members_as_without_it() -> None:
    cluster = begun(residents_max=2, load_max=2.0)
    cluster.job("b")
    cluster.deploy("b/actor")
    cluster.settle()
    (group,) = cluster.core.list_groups(cluster.now)
    assert group["members"] == ["a/actor", "b/actor"]


def test_only_a_rollout_that_is_not_exclusive_can_be_preemptible() -> None:
    cluster = begun()
    with pytest.raises(InvalidRequestError, match="only a rollout"):
        cluster.deploy("e/actor", preemptible=True)
    with pytest.raises(InvalidRequestError, match="only a rollout"):
        cluster.deploy("e/other", "rollout", preemptible=True, exclusive=True)
    cluster.job("gang", gang=2)
    with pytest.raises(InvalidRequestError, match="gang"):
        cluster.deploy("gang/batch", "rollout", preemptible=True)
