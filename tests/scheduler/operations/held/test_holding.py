"""Operations that meet a full disk are retried, and no operation fails because of it."""

import pytest

from plexrl.errors import StateTierFullError
from plexrl.scheduler.state.deployment.wpg.backoff import BACKOFF_S_MAX
from plexrl.scheduler.state.messages import events as ev
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.recovery.test_rebuilding import refuse, train, trained


@pytest.fixture
def cluster() -> FakeCluster:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t"))
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=4)
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    return cluster


def test_a_held_operation_goes_back_to_the_head_of_its_queue(cluster: FakeCluster) -> None:
    for index in (1, 2, 3):
        cluster.submit(f"a:{index}", "a/actor", "optim_step")
    cluster.refuse(cluster.runs[0])
    assert [cluster.state_of(f"a:{index}") for index in (1, 2, 3)] == ["pending"] * 3
    explanation = cluster.explanation_of("a:1")
    assert explanation["rule"] == "held"
    assert "no room" in explanation["reason"]
    assert explanation["position"] == 0
    assert explanation["eta_s"] is not None
    assert 0 < explanation["eta_s"] < BACKOFF_S_MAX
    cluster.settle()
    assert [cluster.state_of(f"a:{index}") for index in (1, 2, 3)] == ["finished"] * 3
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2", "a:3"]


@pytest.mark.parametrize(
    "code",
    [
        *("storage_full", "state_tier_full", "journal_full", "device_memory_full"),
        *("unavailable", "overloaded"),
    ],
)
def test_every_condition_that_passes_holds(cluster: FakeCluster, code: str) -> None:
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.refuse(cluster.runs[0], code)
    assert cluster.state_of("a:1") == "pending"
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"


def test_a_held_operation_is_tried_ever_more_rarely_but_without_end(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step")
    pauses = []
    for _ in range(12):
        (run,) = cluster.runs
        refused_at = cluster.now
        cluster.refuse(run)
        while not cluster.runs:
            assert cluster.timer_at is not None
            cluster.pass_time(cluster.timer_at - cluster.now)
        pauses.append(cluster.now - refused_at)
    assert pauses == sorted(pauses)
    assert pauses[0] < 2
    assert pauses[-1] == pytest.approx(BACKOFF_S_MAX)
    cluster.settle()
    assert cluster.state_of("a:1") == "finished"


def test_the_status_names_the_held_until_their_work_goes_on(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.refuse(cluster.runs[0])
    since = cluster.now
    held = cluster.core.status(cluster.now)["held"]
    assert [(each["deployment"], each["code"], each["since"]) for each in held] == [
        ("a/actor", "storage_full", since)
    ]
    assert cluster.core.status(cluster.now, "somebody else")["held"] == []
    cluster.settle()
    assert cluster.core.status(cluster.now)["held"] == []


def test_others_have_the_group_while_one_is_held(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step")
    for _ in range(5):
        (run,) = cluster.runs
        cluster.refuse(run)
        cluster.pass_time(BACKOFF_S_MAX)
    (run,) = cluster.runs
    cluster.refuse(run)
    cluster.submit("b:1", "b/actor", "optim_step")
    cluster.pass_time(0.5)
    assert [run.kind for run in cluster.runs] == ["offload"]
    cluster.settle()
    assert cluster.state_of("b:1") == cluster.state_of("a:1") == "finished"


def test_a_held_publish_keeps_its_sync_waiting(cluster: FakeCluster) -> None:
    cluster.send(ev.JobFinished(job="b", outcome="completed"))
    cluster.job("c")
    cluster.deploy("c/actor", workers=2)
    cluster.send(ev.JobFinished(job="a", outcome="completed"))
    cluster.deploy("c/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("c:1", "c/rollout", "sync_weights", source="c/actor")
    while not any(run.kind == "publish" for run in cluster.runs):
        cluster.execute(cluster.runs[0])
    (publish,) = [run for run in cluster.runs if run.kind == "publish"]
    cluster.refuse(publish, "state_tier_full")
    assert cluster.state_of("c:1") == "pending"
    explanation = cluster.explanation_of("c:1")
    assert "no room" in explanation["reason"]
    cluster.settle()
    assert cluster.state_of("c:1") == "finished"


def test_a_deadline_ends_the_tries_of_a_held_operation(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step", deadline_s=3.0)
    cluster.refuse(cluster.runs[0])
    cluster.pass_time(1.5)
    cluster.pass_time(2.0)
    (run,) = cluster.runs
    assert run.operation == "a:1", "what runs at its deadline is finished"
    cluster.refuse(run)
    assert cluster.error_of("a:1")["code"] == "deadline_exceeded"
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.settle()
    assert cluster.state_of("a:2") == "finished"


def test_a_held_operation_can_be_cancelled(cluster: FakeCluster) -> None:
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.refuse(cluster.runs[0])
    cluster.send(ev.OperationCancelled(operation="a:1"))
    assert cluster.state_of("a:1") == "cancelled"
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:2"]
    assert cluster.core.status(cluster.now)["held"] == []


def test_a_held_replay_is_repeated_and_costs_no_attempt() -> None:
    cluster = FakeCluster(launch_attempts=1)
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t"))
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.settle()
    cluster.kill("a/actor")
    cluster.submit("a:3", "a/actor", "optim_step")
    while not any(run.replay for run in cluster.runs):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        else:
            cluster.execute(cluster.runs[0])
    for _ in range(3):
        (run,) = cluster.runs
        assert run.replay
        cluster.refuse(run)
        cluster.pass_time(BACKOFF_S_MAX)
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2", "a:3"]


def test_silence_while_the_scheduler_could_not_hear_is_no_controllers_doing() -> None:
    cluster = FakeCluster()
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="t"))
    cluster.send(
        ev.JobSubmitted(
            job="a", tenant="t", name="a", controller_timeout_s=10, reattach_timeout_s=10
        )
    )
    cluster.now += 100
    cluster.send(ev.ServiceResumed())
    cluster.pass_time(5)
    assert cluster.core.job_view("a", cluster.now)["attached"]
    cluster.pass_time(30)
    assert cluster.core.job_view("a", cluster.now)["state"] == "CANCELLED"


def test_workers_that_find_no_room_to_start_are_started_until_there_is_room() -> None:
    cluster = trained(launch_attempts=2)
    cluster.submit("a:3", "a/actor", "forward_backward")
    cluster.kill("a/actor")
    for _ in range(10):
        (launch,) = cluster.launches
        for rank in launch.ranks:
            exited = ev.WorkerExited(
                deployment="a/actor",
                rank=rank.rank,
                incarnation=launch.incarnation,
                reason="No space left on device",
                code="storage_full",
            )
            cluster.send(exited)
        assert not cluster.launches, "not again at once"
        view = cluster.core.operation_view("a:3", cluster.now)
        assert "No space left on device" in str(view)
        cluster.pass_time(5.0)
    train(cluster, 4)
    assert cluster.wpgs["a/actor"].device == [f"a:{index}" for index in range(5)]


@pytest.mark.parametrize("kind", ["forward_backward", "optim_step", "save_checkpoint"])
def test_an_operation_for_which_one_rank_had_no_room_is_done_again_by_all(kind: str) -> None:
    """However often, it is neither lost nor a failure of the workers."""
    cluster = trained(launch_attempts=1)
    cluster.submit("a:3", "a/actor", kind)
    cluster.submit("a:4", "a/actor", "forward_backward")
    for _ in range(5):
        while not any(run.operation == "a:3" for run in cluster.runs):
            if cluster.launches:
                cluster.launch(cluster.launches[0])
            elif cluster.runs:
                cluster.execute(cluster.runs[0])
            else:
                cluster.pass_time(5.0)
        (run,) = cluster.runs
        refuse(cluster, run, StateTierFullError("no room for the copy of the moments"))
        assert cluster.state_of("a:3") == "pending"
        assert "no room for the copy" in str(cluster.core.operation_view("a:3", cluster.now))
    cluster.settle()
    assert cluster.state_of("a:3") == "finished"
    applied = ["a:3"] if kind != "save_checkpoint" else []
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2", *applied, "a:4"]
