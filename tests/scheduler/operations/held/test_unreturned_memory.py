"""A load without enough device memory gets no lock, and workers that kept some are restarted."""

from collections.abc import Mapping
from typing import Any

import pytest

from plexrl.errors import DeviceMemoryFullError
from plexrl.model.memory.device_memory import CONTEXT_BYTES
from plexrl.scheduler.core.outcomes import REFUSED_LOAD_FACTOR
from plexrl.scheduler.operations.held.holding import foreign_memory_view
from plexrl.scheduler.operations.held.unreturned_memory import KEPT_FACTOR
from plexrl.scheduler.state.deployment.wpg.backoff import BACKOFF_S_MAX
from plexrl.scheduler.state.messages import events as ev
from plexrl.statemanager.daemon.memory.holders import DeviceHolder, DeviceNeed, held_error
from plexrl.wire import messages as cmd
from tests.scheduler.fake_cluster import FakeCluster

KEPT = KEPT_FACTOR * CONTEXT_BYTES
PID = 4242


def ready_for_b(cluster: FakeCluster) -> FakeCluster:
    """Two jobs on one group: the first has worked and is offloaded for the second."""
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t"))
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=4)
        cluster.submit(f"{job}:0", f"{job}/actor", "barrier")
        cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "optim_step")
    until_b_loads(cluster)
    return cluster


def until_b_loads(cluster: FakeCluster) -> None:
    while not any(run.kind == "load" and run.deployment == "b/actor" for run in cluster.runs):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        elif cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(1.0)


@pytest.fixture
def cluster() -> FakeCluster:
    return ready_for_b(FakeCluster())


def refuse(
    cluster: FakeCluster,
    *,
    on_all_ranks: bool = True,
    deployment: str = "a/actor",
    process_bytes: int = 0,
    strangers: Mapping[int, int] | None = None,
    error: DeviceMemoryFullError | None = None,
) -> list[cmd.Command]:
    """The StateManager refuses rank 1 of the only load, or all ranks."""
    (load,) = cluster.runs
    cluster.runs.clear()
    if error is None:
        need = DeviceNeed(
            "rank 1 of 'b/actor'", rank=1, device=3, state_bytes=1000, working_bytes=0
        )
        resident = DeviceHolder(deployment, rank=0, pid=11, lent_bytes=0)
        held = {11: process_bytes, **(strangers or {})}
        error = held_error(need, 0, [resident], held, shared_bytes=0)
    return cluster.send(
        ev.OperationFailed(
            operation=load.operation,
            token=load.token,
            error=error.to_wire(),
            state_intact=on_all_ranks,
        )
    )


def restarts(commands: list[cmd.Command]) -> list[str]:
    return [each.deployment for each in commands if isinstance(each, cmd.LaunchWorkers)]


def test_the_lock_is_free_and_the_reason_is_shown(cluster: FakeCluster) -> None:
    refuse(cluster, process_bytes=KEPT)
    assert cluster.runs == []
    (group,) = cluster.core._context.state.groups.values()
    assert group.holder is None
    explanation = cluster.explanation_of("b:1")
    assert explanation["rule"] == "held"
    assert f"'a/actor' has offloaded, but its process 11 still holds {KEPT}" in str(explanation)
    (held,) = cluster.core.status(cluster.now)["held"]
    assert (held["deployment"], held["code"]) == ("b/actor", "device_memory_full")
    cluster.settle()
    assert cluster.core.status(cluster.now)["held"] == []


def test_a_resident_that_kept_memory_is_restarted_once_and_loses_nothing(
    cluster: FakeCluster,
) -> None:
    assert restarts(refuse(cluster, process_bytes=KEPT + 1)) == ["a/actor"]
    cluster.launch(cluster.launches[-1])
    while not cluster.runs:
        cluster.pass_time(1.0)
    assert restarts(refuse(cluster, process_bytes=KEPT + 1)) == [], "it was not loaded since"
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


def test_it_is_restarted_too_if_only_some_ranks_lack_memory(cluster: FakeCluster) -> None:
    found = restarts(refuse(cluster, on_all_ranks=False, process_bytes=KEPT + 1))
    assert sorted(found) == ["a/actor", "b/actor"], "ranks of b that loaded hold its state"
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


def test_refusals_of_some_ranks_never_end_the_job() -> None:
    cluster = ready_for_b(FakeCluster(launch_attempts=1))
    for _ in range(12):
        assert restarts(refuse(cluster, on_all_ranks=False)) == ["b/actor"]
        assert "needs 1000 bytes of device 3" in cluster.explanation_of("b:1")["reason"]
        cluster.launch(cluster.launches[-1])
        while not cluster.runs:
            cluster.pass_time(1.0)
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"


@pytest.mark.parametrize("on_all_ranks", [True, False])
@pytest.mark.parametrize(
    "refusal",
    [
        {"process_bytes": KEPT},
        {"process_bytes": 8 * KEPT, "deployment": "nobody/actor"},
        {"error": DeviceMemoryFullError("full", rank=9, holders="many", strangers={"x": "y"})},
    ],
    ids=["a context", "unknown", "unreadable"],
)
def test_nobody_else_is_restarted(
    cluster: FakeCluster, refusal: Any, *, on_all_ranks: bool
) -> None:
    found = restarts(refuse(cluster, on_all_ranks=on_all_ranks, **refusal))
    assert found == ([] if on_all_ranks else ["b/actor"])
    assert cluster.core.deployment_view("a/actor", cluster.now)["residency"] == "offloaded"
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"


def test_a_foreign_process_is_shown_until_the_load_succeeds(cluster: FakeCluster) -> None:
    strangers = {PID: KEPT + 1, 7: KEPT}
    refused_at = cluster.now
    refuse(cluster, strangers=strangers)
    cluster.pass_time(1.0)
    refuse(cluster, strangers=strangers)
    rank = cluster.core._context.state.deployment("b/actor").placement.ranks[1]
    held = {"node": "n", "gpu": rank.gpu, "pid": PID, "nbytes": KEPT + 1, "since": refused_at}
    assert foreign_memory_view(cluster.core.cluster.state) == [held], (
        "process 7 may be a worker that starts"
    )
    (node,) = cluster.core.list_nodes()
    assert node["foreign_memory"] == [held]
    assert "foreign_memory" not in cluster.core.list_nodes("t")[0]
    records = dict(cluster.core.records(0.0).look(cluster.now))
    assert f"process {PID}, which is no worker, holds {KEPT + 1} bytes of GPU" in str(
        records["nodes/n"]
    )
    cluster.restart_scheduler(restored=True)
    assert foreign_memory_view(cluster.core.cluster.state) == [held]
    until_b_loads(cluster)
    cluster.execute(cluster.runs[0])
    assert foreign_memory_view(cluster.core.cluster.state) == []
    assert cluster.state_of("b:1") != "finished"
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"


def test_what_waits_for_a_foreign_process_moves_away_with_a_drain() -> None:
    cluster = ready_for_b(FakeCluster())
    cluster.join_node(4, "other")
    refuse(cluster, strangers={PID: KEPT + 1})
    cluster.send(ev.NodeDrainChanged(node="n", is_draining=True))
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"
    assert "other" in {
        node
        for job in ("a", "b")
        for node in cluster.core._context.state.deployment(f"{job}/actor").placement.nodes
    }


@pytest.mark.parametrize("move_s", [0.1, 4.0])
def test_a_refused_load_takes_at_most_a_tenth_of_the_time_from_the_others(move_s: float) -> None:
    cluster = FakeCluster()
    cluster.compute_s = move_s
    ready_for_b(cluster)
    pauses = []
    for index in range(20):
        refused_at = cluster.now
        refuse(cluster)
        cluster.submit(f"a:more{index}", "a/actor", "barrier")
        until_b_loads(cluster)
        pauses.append(cluster.now - refused_at)
    view = cluster.core.deployment_view("b/actor", cluster.now)
    switch_s = view["load_s"] + view["offload_s"]
    assert pauses[0] < 3
    longest_s = max(BACKOFF_S_MAX, REFUSED_LOAD_FACTOR * switch_s)
    assert (longest_s > BACKOFF_S_MAX) is (move_s > 1)
    assert longest_s <= pauses[-1] < longest_s + 3


def test_a_deadline_ends_a_wait_for_memory(cluster: FakeCluster) -> None:
    refuse(cluster, strangers={PID: KEPT + 1})
    cluster.submit("b:2", "b/actor", "optim_step", deadline_s=5.0)
    for _ in range(3):
        until_b_loads(cluster)
        refuse(cluster, strangers={PID: KEPT + 1})
    cluster.pass_time(6.0)
    assert cluster.error_of("b:2")["code"] == "deadline_exceeded"
    assert cluster.state_of("b:1") == "pending", "it has no deadline, and its reason is shown"
    assert foreign_memory_view(cluster.core.cluster.state)


def reasons_of_b(cluster: FakeCluster, *, sees_all: bool) -> list[str]:
    """Why the operation of b waits, in each place where a tenant, or an operator, reads it."""
    core, now = cluster.core, cluster.now
    job = core.explain_job("b", now, sees_all=sees_all)
    (held,) = core.status(now, None if sees_all else "t")["held"]
    return [
        job["summary"],
        *[each["reason"] for each in job["operations"]],
        held["message"],
    ]


@pytest.mark.parametrize("on_all_ranks", [True, False])
def test_a_tenant_reads_no_names_of_others_and_an_operator_reads_them_all(
    cluster: FakeCluster, *, on_all_ranks: bool
) -> None:
    cluster.send(ev.TenantCreated(tenant="u", key_digest="u"))
    cluster.job("c", tenant="u")
    cluster.deploy("c/actor", workers=4)
    refuse(cluster, deployment="c/actor", process_bytes=KEPT, on_all_ranks=on_all_ranks)
    for reason in reasons_of_b(cluster, sees_all=False):
        assert "rank 0 of another tenant's deployment has offloaded" in reason
    for reason in reasons_of_b(cluster, sees_all=True):
        assert "rank 0 of 'c/actor' has offloaded" in reason
    record = dict(cluster.core.records(0.0).look(cluster.now))["jobs/t/b"]
    assert "of another tenant's deployment has offloaded" in str(record)
    cluster.restart_scheduler(restored=True)
    assert "another tenant's deployment" in reasons_of_b(cluster, sees_all=False)[0]
    assert "'c/actor'" in reasons_of_b(cluster, sees_all=True)[0]
