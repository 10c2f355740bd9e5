"""Examples of the scheduler core, event by event."""

import pytest

from plexrl import errors
from plexrl.scheduler.dispatch.bursts import BOUND_S_MIN
from plexrl.scheduler.queries.views import operation_log
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import ListOperations
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.scheduler.fake_cluster import FakeCluster


@pytest.fixture
def cluster() -> FakeCluster:
    made = FakeCluster()
    made.start_node()
    return made


def with_jobs(cluster: FakeCluster, *names: str) -> None:
    for name in names:
        cluster.job(name)
        cluster.deploy(f"{name}/actor")
    cluster.settle()


def kinds(commands: list[cmd.Command]) -> list[str]:
    return [c.kind.value if isinstance(c, cmd.Run) else type(c).__name__ for c in commands]


def test_a_deployment_is_launched_on_gpus_of_its_own_node(cluster: FakeCluster) -> None:
    cluster.job("a")
    commands = cluster.send(
        ev.DeploymentCreated(
            deployment="a/actor",
            job="a",
            kind="train",
            workers=2,
            state_bytes=10,
            exclusive=False,
            spec_json="{}",
        )
    )
    (launch,) = [c for c in commands if isinstance(c, cmd.LaunchWorkers)]
    assert [(rank.node, rank.gpu) for rank in launch.ranks] == [("n", 0), ("n", 1)]
    assert launch.incarnation == 1


def test_the_first_operation_is_preceded_by_a_load_of_the_initial_state(
    cluster: FakeCluster,
) -> None:
    with_jobs(cluster, "a")
    cluster.submit("a:1", "a/actor", "barrier")
    (load,) = cluster.runs
    assert (load.kind, load.seq, load.token) == (OperationKind.LOAD, 0, 1)
    cluster.execute(load)
    assert [run.operation for run in cluster.runs] == ["a:1"]


def test_another_jobs_operation_offloads_the_resident_first_under_a_new_token(
    cluster: FakeCluster,
) -> None:
    with_jobs(cluster, "a", "b")
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "barrier")
    seen = []
    while cluster.runs or cluster.timer_at:
        if cluster.runs:
            seen.append((cluster.runs[0].kind.value, cluster.runs[0].deployment))
            assert cluster.runs[0].token == 2
            cluster.execute(cluster.runs[0])
        elif cluster.timer_at is not None and cluster.timer_at < cluster.now + 10:
            cluster.pass_time(cluster.timer_at - cluster.now)
        else:
            break
    assert seen == [("offload", "a/actor"), ("load", "b/actor"), ("barrier", "b/actor")]
    (group,) = cluster.core.list_groups(cluster.now)
    assert (group["holder"], group["switches"]) == ("b/actor", 1)
    assert cluster.core.job_view("a", cluster.now)["state"] == "SUSPENDED"


def test_a_burst_is_not_broken_up_by_a_job_that_has_waited_longer(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a", "b")
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.pass_time(BOUND_S_MIN - 0.1)
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.execute(cluster.runs[0])
    assert [run.operation for run in cluster.runs] == ["a:2"]


def test_a_burst_over_its_bound_yields(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a", "b")
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.pass_time(BOUND_S_MIN + 0.1)
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.execute(cluster.runs[0])
    assert [run.kind.value for run in cluster.runs] == ["offload"]


def test_a_sync_waits_for_the_publish_of_its_trainer(cluster: FakeCluster) -> None:
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/rollout", "sync_weights", source="a/actor")
    assert cluster.state_of("a:2") == "pending"
    explanation = cluster.explanation_of("a:2")
    assert explanation["rule"] == "dependency"
    cluster.settle()
    assert cluster.state_of("a:2") == "finished"
    rows = operation_log(cluster.core.cluster, None, ListOperations(), cluster.now)
    order = [row["operation"] for row in rows if not row["operation"].startswith("a/")]
    assert order == ["a:1", "a:2#publish", "a:2"]


def test_generates_overlap_and_a_sync_waits_for_them(cluster: FakeCluster) -> None:
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/rollout", "generate")
    cluster.submit("a:2", "a/rollout", "generate")
    cluster.submit("a:3", "a/rollout", "barrier")
    cluster.submit("a:4", "a/rollout", "generate")
    assert [run.operation for run in cluster.runs] == ["a:1", "a:2"]
    cluster.execute(cluster.runs[0])
    assert [run.operation for run in cluster.runs] == ["a:2"]
    cluster.execute(cluster.runs[0])
    assert [run.operation for run in cluster.runs] == ["a:3"]


def test_a_sync_in_flight_runs_beside_generates_and_what_follows_waits_for_it(
    cluster: FakeCluster,
) -> None:
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("a:0", "a/rollout", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/rollout", "generate")
    cluster.submit("a:2", "a/rollout", "sync_weights", "a/actor", in_flight=True)
    cluster.submit("a:3", "a/rollout", "sync_weights", "a/actor", in_flight=True)
    cluster.submit("a:4", "a/rollout", "generate")
    while len(cluster.runs) < 2 or cluster.runs[1].operation != "a:2":
        # The trainer is loaded, and publishes.
        cluster.execute(cluster.runs[1])
    first, sync = cluster.runs
    assert (first.operation, sync.operation, sync.seq) == ("a:1", "a:2", 1)
    cluster.execute(sync)
    assert [run.operation for run in cluster.runs] == ["a:1", "a:3"]
    cluster.execute(cluster.runs[1])
    assert [(run.operation, run.seq) for run in cluster.runs] == [("a:1", 0), ("a:4", 2)]
    # What a dead worker interrupted is drawn again, with the weights of the last sync.
    cluster.kill("a/rollout")
    cluster.launch(cluster.launches[0])
    seen = []
    while cluster.runs:
        seen.append((cluster.runs[0].operation, cluster.runs[0].seq))
        cluster.execute(cluster.runs[0])
    assert seen[1:] == [("a:3", 2), ("a:1", 2), ("a:4", 2)]


def test_only_a_sync_can_be_in_flight(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    with pytest.raises(errors.InvalidRequestError, match="only a sync can"):
        cluster.submit("a:1", "a/actor", "barrier", in_flight=True)


def test_a_dead_worker_costs_a_load_and_a_replay_and_not_a_step(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    for index in range(2):
        cluster.submit(f"a:{index}", "a/actor", "optim_step")
    cluster.settle()
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.kill("a/actor")
    cluster.launch(cluster.launches[0])
    seen = []
    while cluster.runs:
        run = cluster.runs[0]
        seen.append((run.operation if run.kind != OperationKind.LOAD else "load", run.replay))
        cluster.execute(run)
    assert seen == [("load", False), ("a:0", True), ("a:1", True), ("a:2", False)]
    assert cluster.wpgs["a/actor"].device == ["a:0", "a:1", "a:2"]


def test_a_report_of_a_former_grant_changes_nothing(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    cluster.submit("a:1", "a/actor", "barrier")
    cluster.execute(cluster.runs[0])
    token = cluster.runs[0].token
    cluster.send(ev.OperationFinished(operation="a:1", token=token - 1, compute_s=1.0))
    assert cluster.state_of("a:1") == "running"


def test_an_offload_that_finds_no_room_is_called_off_and_tried_again_later(
    cluster: FakeCluster,
) -> None:
    with_jobs(cluster, "a", "b")
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "barrier")
    cluster.pass_time(1.0)
    (offload,) = cluster.runs
    cluster.runs.clear()
    cluster.send(
        ev.OperationFailed(
            operation=offload.operation,
            token=offload.token,
            error={"code": "state_tier_full", "message": "no room", "details": {}},
            state_intact=True,
        )
    )
    assert cluster.runs == []
    explanation = cluster.explanation_of("b:1")
    assert explanation["rule"] == "held"
    assert "no room" in explanation["reason"]
    cluster.settle()
    assert cluster.state_of("b:1") == "finished"


def test_a_failed_operation_is_answered_and_its_place_in_the_order_used_again(
    cluster: FakeCluster,
) -> None:
    with_jobs(cluster, "a")
    cluster.submit("a:0", "a/actor", "barrier")
    cluster.settle()
    cluster.submit("a:1", "a/actor", "optim_step")
    cluster.submit("a:2", "a/actor", "optim_step")
    (run,) = cluster.runs
    cluster.runs.clear()
    cluster.send(
        ev.OperationFailed(
            operation="a:1",
            token=run.token,
            error={"code": "non_finite_gradient", "message": "inf", "details": {}},
            state_intact=True,
        )
    )
    assert cluster.state_of("a:1") == "failed"
    assert [(r.operation, r.seq) for r in cluster.runs] == [("a:2", run.seq)]


def test_the_end_of_a_job_frees_its_gpus_for_one_that_waits(cluster: FakeCluster) -> None:
    for name in ("a", "b", "c"):
        cluster.job(name)
        cluster.deploy(f"{name}/rollout", "rollout", workers=1)
        cluster.deploy(f"{name}/second", "rollout", workers=1)
    cluster.settle()
    assert cluster.core.job_view("c", cluster.now)["state"] == "QUEUED"
    commands = cluster.send(ev.JobFinished(job="a", outcome="completed"))
    assert kinds(commands).count("StopWorkers") == 2
    assert kinds(commands).count("LaunchWorkers") == 2
    assert cluster.core.job_view("c", cluster.now)["state"] == "ADMITTED"


def test_a_silent_controller_detaches_its_job_and_then_cancels_it(cluster: FakeCluster) -> None:
    cluster.send(
        ev.JobSubmitted(
            job="a", tenant="t", name="a", controller_timeout_s=10, reattach_timeout_s=20
        )
    )
    cluster.pass_time(11)
    assert cluster.core.job_view("a", cluster.now)["attached"] is False
    cluster.send(ev.ControllerSeen(job="a"))
    assert cluster.core.job_view("a", cluster.now)["attached"] is True
    cluster.pass_time(31)
    assert cluster.core.job_view("a", cluster.now)["state"] == "CANCELLED"


def test_workers_that_never_live_end_the_job_with_the_reason() -> None:
    cluster = FakeCluster(launch_attempts=2)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    for _ in range(3):
        cluster.launch(cluster.launches[0])
        cluster.kill("a/actor")
    view = cluster.core.job_view("a", cluster.now)
    assert view["state"] == "FAILED"
    assert "killed" in view["reason"]


def test_the_same_submission_again_is_the_same_operation(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    cluster.submit("a:1", "a/actor", "barrier")
    before = list(cluster.runs)
    cluster.submit("a:1", "a/actor", "barrier")
    assert cluster.runs == before
    with pytest.raises(errors.ConflictError):
        cluster.submit("a:1", "a/actor", "optim_step")


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (ev.JobFinished(job="x", outcome="completed"), errors.UnknownJobError),
        (ev.JobFinished(job="a", outcome="bored"), errors.InvalidRequestError),
        (ev.OperationCancelled(operation="x"), errors.UnknownOperationError),
        (
            ev.OperationSubmitted(
                operation="o",
                deployment="x",
                kind=OperationKind.BARRIER,
                params=None,
            ),
            errors.UnknownDeploymentError,
        ),
        (
            ev.OperationSubmitted(
                operation="o",
                deployment="a/actor",
                kind=OperationKind.GENERATE,
                params=None,
            ),
            errors.InvalidRequestError,
        ),
    ],
)
def test_a_refused_event_leaves_no_trace(
    cluster: FakeCluster, event: ev.Event, error: type[errors.PlexRLError]
) -> None:
    with_jobs(cluster, "a")
    before = cluster.core.list_jobs(None, cluster.now), cluster.core.status(cluster.now)
    with pytest.raises(error):
        cluster.core.handle(event, cluster.now)
    assert (cluster.core.list_jobs(None, cluster.now), cluster.core.status(cluster.now)) == before


def test_a_queue_has_a_bound() -> None:
    cluster = FakeCluster(pending_operations_max=2)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.submit("a:1", "a/actor", "barrier")
    cluster.submit("a:2", "a/actor", "barrier")
    with pytest.raises(errors.OverloadedError) as refused:
        cluster.submit("a:3", "a/actor", "barrier")
    assert refused.value.details["retry_after_s"] > 0  # type: ignore[operator]


def test_a_deployment_asked_for_again_is_the_same_one(cluster: FakeCluster) -> None:
    cluster.job("a")
    for _ in range(2):
        cluster.deploy("a/actor")
        cluster.deploy("a/rollout", "rollout", workers=1)
    assert len(cluster.core.job_view("a", cluster.now)["deployments"]) == 2
    with pytest.raises(errors.ConflictError, match=r"settings: workers \(1, not 2\): use another"):
        cluster.deploy("a/rollout", "rollout", workers=2)


def test_an_operation_that_kills_its_worker_is_not_tried_for_ever() -> None:
    cluster = FakeCluster(launch_attempts=2)
    cluster.start_node()
    with_jobs(cluster, "a")
    cluster.submit("a:1", "a/actor", "optim_step")
    for _ in range(3):
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        cluster.execute(cluster.runs[0])
        assert [run.operation for run in cluster.runs] == ["a:1"]
        cluster.kill("a/actor")
    assert cluster.core.job_view("a", cluster.now)["state"] == "FAILED"
    assert cluster.state_of("a:1") == "cancelled"


def test_what_a_recovery_repeats_is_bounded_in_seconds_too() -> None:
    cluster = FakeCluster(snapshot_operations=64, snapshot_work_s=100.0)
    cluster.start_node()
    cluster.compute_s = 40.0
    with_jobs(cluster, "a")
    for index in range(4):
        cluster.submit(f"a:{index}", "a/actor", "optim_step")
    seen = []
    while cluster.runs:
        seen.append(cluster.runs[0].kind.value)
        cluster.execute(cluster.runs[0])
    assert seen[-5:] == ["optim_step"] * 3 + ["snapshot", "optim_step"]


def test_a_snapshot_that_finds_no_room_does_not_hold_training_up(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    for index in range(cluster.config.snapshot_operations + 1):
        cluster.submit(f"a:{index}", "a/actor", "optim_step")
    while cluster.runs[0].kind != OperationKind.SNAPSHOT:
        cluster.execute(cluster.runs[0])
    (snapshot,) = cluster.runs
    cluster.runs.clear()
    cluster.send(
        ev.OperationFailed(
            operation=snapshot.operation,
            token=snapshot.token,
            error={"code": "state_tier_full", "message": "no room", "details": {}},
            state_intact=True,
        )
    )
    assert [run.kind.value for run in cluster.runs] == ["optim_step"]


def test_an_abort_is_said_again_to_the_next_router(cluster: FakeCluster) -> None:
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("a:1", "a/rollout", "generate")
    cluster.execute(cluster.runs[0])
    cluster.send(ev.OperationCancelled(operation="a:1"))
    cluster.lose_router()
    commands = cluster.send(ev.RouterJoined(router="r"))
    assert kinds(commands) == ["generate", "AbortOperation"]


def test_an_id_is_known_again_while_it_is_among_the_last_of_history() -> None:
    cluster = FakeCluster(history=3)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout", workers=1)
    for number in range(1, 4):
        cluster.submit(f"a:{number}", "a/rollout", "generate")
        cluster.settle()
    known = [
        row["operation"]
        for row in operation_log(cluster.core.cluster, None, ListOperations(limit=9), cluster.now)
    ]
    for operation in (name for name in known if name.startswith("a:")):
        cluster.submit(operation, "a/rollout", "generate")
    assert not cluster.runs, "a repetition runs again"
    for number in range(4, 7):
        cluster.submit(f"a:{number}", "a/rollout", "generate")
        cluster.settle()
    with pytest.raises(errors.UnknownOperationError):
        cluster.state_of("a:1")
    cluster.submit("a:1", "a/rollout", "generate")
    assert [run.operation for run in cluster.runs] == ["a:1"]


def test_a_sync_needs_no_history_of_its_publish() -> None:
    cluster = FakeCluster(history=1)
    cluster.start_node()
    cluster.job("a")
    cluster.deploy("a/actor")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("a:1", "a/rollout", "generate")
    cluster.submit("a:2", "a/rollout", "sync_weights", source="a/actor")
    cluster.submit("a:3", "a/actor", "barrier")
    while any(run.deployment == "a/actor" for run in cluster.runs):
        cluster.execute(next(run for run in cluster.runs if run.deployment == "a/actor"))
    cluster.settle()
    assert cluster.state_of("a:2") == "finished"


def test_no_name_of_a_callers_is_a_name_of_the_schedulers(cluster: FakeCluster) -> None:
    with_jobs(cluster, "a")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("x:publish", "a/actor", "forward_backward")
    cluster.submit("a/actor:load:1:1", "a/actor", "optim_step")
    cluster.submit("x", "a/rollout", "sync_weights", source="a/actor")
    with pytest.raises(errors.InvalidRequestError, match="reserved for the scheduler"):
        cluster.submit("y#publish", "a/actor", "forward_backward")
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["x:publish", "a/actor:load:1:1"]
    assert cluster.state_of("x") == "finished"


def test_a_cancelled_generation_is_not_drawn_again_after_a_crash(cluster: FakeCluster) -> None:
    cluster.job("a")
    cluster.deploy("a/rollout", "rollout", workers=1)
    cluster.settle()
    cluster.submit("g", "a/rollout", "generate")
    cluster.execute(cluster.runs[0])
    assert [run.kind.value for run in cluster.runs] == ["generate"]
    cluster.send(ev.OperationCancelled(operation="g"))
    cluster.kill("a/rollout")
    cluster.settle()
    assert cluster.state_of("g") == "cancelled"
