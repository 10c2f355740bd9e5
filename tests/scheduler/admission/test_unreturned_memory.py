"""A load without enough device memory gets no lock, and workers that kept some are restarted."""

import msgspec
import pytest

from plexrl.errors import DeviceMemoryFullError
from plexrl.model.memory.device_memory import CONTEXT_BYTES
from plexrl.scheduler.admission.reclaim.unreturned_memory import KEPT_FACTOR
from plexrl.scheduler.state.messages import commands as cmd
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster

KEPT = KEPT_FACTOR * CONTEXT_BYTES


@pytest.fixture
def cluster() -> FakeCluster:
    """Two jobs on one group: the first has worked and is offloaded for the second."""
    cluster = FakeCluster()
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
    while not any(run.kind == "load" and run.deployment == "b/actor" for run in cluster.runs):
        if cluster.runs:
            cluster.execute(cluster.runs[0])
        else:
            cluster.pass_time(1.0)
    return cluster


def refuse(cluster: FakeCluster, **holder: object) -> list[cmd.Command]:
    (load,) = cluster.runs
    cluster.runs.clear()
    held = {"deployment": "a/actor", "rank": 0, "lent_bytes": 0, "process_bytes": 0, **holder}
    error = DeviceMemoryFullError("a/actor holds it", holders=[held])
    return cluster.send(
        ev.OperationFailed(
            operation=load.operation,
            token=load.token,
            error_json=msgspec.json.encode(error.to_wire()).decode(),
            state_intact=True,
        )
    )


def restarts(commands: list[cmd.Command]) -> list[str]:
    return [each.deployment for each in commands if isinstance(each, cmd.LaunchWorkers)]


def test_the_lock_is_free_and_the_reason_is_shown(cluster: FakeCluster) -> None:
    refuse(cluster, process_bytes=KEPT)
    (group,) = cluster.core._context.state.groups.values()
    assert group.holder is None
    explanation = cluster.explanation_of("b:1")
    assert explanation["rule"] == "backoff"
    assert "a/actor holds it" in explanation["reason"]


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


@pytest.mark.parametrize(
    "holder",
    [
        {"process_bytes": KEPT},
        {"process_bytes": 8 * KEPT, "deployment": "nobody/actor"},
        {"process_bytes": "much"},
    ],
    ids=["a context", "unknown", "unreadable"],
)
def test_nobody_else_is_restarted(cluster: FakeCluster, holder: dict[str, object]) -> None:
    assert restarts(refuse(cluster, **holder)) == []
    assert cluster.core.deployment_view("a/actor", cluster.now)["residency"] == "offloaded"
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"
