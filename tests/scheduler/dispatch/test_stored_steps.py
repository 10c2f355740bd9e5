"""With an optimizer in host memory offloaded deployments step, whoever holds the group."""

from itertools import count

import pytest

from plexrl.ids import DeploymentId, JobId, OperationId
from plexrl.scheduler.operations.deadlines.bounds import FACTOR, FIRST_FACTOR, runs
from plexrl.scheduler.operations.deadlines.durations import run_s
from plexrl.scheduler.rules.switch_cost import round_trip_s
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.scheduler.state.records import Deployment
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.scheduler.dispatch.test_stored_saves import gpu_seconds, kinds, run_of
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.jobs.asynchronous_job import Clock
from tests.scheduler.placement.test_shared_rollouts import busy


def two_jobs(*, in_host: bool = True, gpus: int = 4, **fields: object) -> FakeCluster:
    cluster = FakeCluster()
    cluster.start_node(gpus)
    for job in ("a", "b"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", steps_in_host=in_host, **fields)
    cluster.settle()
    return cluster


def cluster_with_gradients(*, in_host: bool = True) -> FakeCluster:
    """`a` has gradients and is offloaded; a backward of `b` runs."""
    cluster = two_jobs(in_host=in_host)
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.settle()
    cluster.submit("b:1", "b/actor", "forward_backward")
    cluster.run_until("b:1")
    return cluster


def member(cluster: FakeCluster, name: str = "a/actor") -> Deployment:
    return cluster.core._context.state.deployments[DeploymentId(name)]


def holder(cluster: FakeCluster) -> str | None:
    (group,) = [each for each in cluster.core.list_groups(cluster.now) if each["shared"]]
    return group["holder"]


def test_an_offloaded_deployment_steps_while_another_computes() -> None:
    cluster = cluster_with_gradients()
    before = gpu_seconds(cluster, "a")
    cluster.submit("a:2", "a/actor", "optim_step")
    assert kinds(cluster) == [("forward_backward", "b/actor"), ("optim_step", "a/actor")]
    run = run_of(cluster, "a:2")
    assert isinstance(run, cmd.OptimStep)
    assert run.stored is not None
    assert (run.stored.seq, run.stored.keep_seq, run.seq) == (2, 1, 2)
    cluster.pass_time(5.0)
    cluster.execute(run, trainer_step=1)
    assert cluster.state_of("a:2") == "finished"
    assert gpu_seconds(cluster, "a") == before
    assert holder(cluster) == "b/actor"
    stepped = member(cluster)
    assert stepped.work.replay.durable_seq == stepped.work.replay.completed_seq == 2
    assert stepped.work.trainer_step == 1
    assert not stepped.work.waiting_gradients


def test_a_stored_step_is_expected_from_what_was_measured() -> None:
    """Nothing at first; then the step under the lock and a read and a write of the state; then
    steps of the stored state."""
    cluster = cluster_with_gradients()
    state, stepped = cluster.core._context.state, member(cluster)

    def expected_s(name: str) -> float | None:
        return run_s(state, stepped, state.operations[OperationId(name)])

    cluster.submit("a:2", "a/actor", "optim_step")
    assert expected_s("a:2") is None
    cluster.pass_time(40.0)
    told = cluster.explanation_of("a:2")
    assert (told["eta_s"], "overdue" in told["reason"]) == (None, False)
    stepped.demand.estimates.observe(OperationKind.OPTIM_STEP, 0, 5.0)
    assert expected_s("a:2") == pytest.approx(5.0 + round_trip_s(state, stepped))
    cluster.compute_s = 30.0
    cluster.execute(run_of(cluster, "a:2"))
    assert stepped.demand.estimates.known_s(OperationKind.OPTIM_STEP, 0) == 5.0
    cluster.submit("a:3", "a/actor", "optim_step")
    assert expected_s("a:3") == 30.0
    cluster.pass_time(32.0)
    assert "overdue for 2 s" in cluster.explanation_of("a:3")["reason"]


def test_a_stored_step_has_the_bound_of_such_steps() -> None:
    cluster = cluster_with_gradients()
    stepped, context = member(cluster), cluster.core._context
    stepped.demand.estimates.observe(OperationKind.OPTIM_STEP, 0, 0.1)
    cluster.submit("a:2", "a/actor", "optim_step")
    (run,) = runs(context, stepped)
    least_s = context.settings.config.operation_overdue_s
    assert run.bound_s == FIRST_FACTOR * least_s
    cluster.compute_s = least_s
    cluster.execute(run_of(cluster, "a:2"))
    cluster.submit("a:3", "a/actor", "optim_step")
    (run,) = runs(context, stepped)
    assert run.bound_s == FACTOR * least_s


def test_a_load_waits_for_the_step_and_is_of_what_it_made() -> None:
    cluster = cluster_with_gradients()
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.submit("a:3", "a/actor", "forward")
    cluster.execute(run_of(cluster, "b:1"))
    cluster.pass_time(60.0)
    assert kinds(cluster) == [("optim_step", "a/actor")]
    assert "made in host memory first" in cluster.explanation_of("a:3")["reason"]
    cluster.execute(run_of(cluster, "a:2"))
    loads = []
    while cluster.runs or (cluster.timer_at is not None and cluster.state_of("a:3") != "finished"):
        if cluster.runs:
            run = cluster.runs[0]
            loads += [run.seq] if run.kind.value == "load" else []
            cluster.execute(run)
        else:
            cluster.pass_time(1.0)
    assert cluster.state_of("a:3") == "finished"
    assert loads == [2]
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


def test_an_optimizer_on_the_device_waits_for_the_group() -> None:
    cluster = cluster_with_gradients(in_host=False)
    cluster.submit("a:2", "a/actor", "optim_step")
    assert kinds(cluster) == [("forward_backward", "b/actor")]


@pytest.mark.parametrize("code", ["state_lost", "conflict", "state_tier_full", "unavailable"])
def test_a_step_that_host_memory_refuses_is_made_after_a_load(code: str) -> None:
    cluster = cluster_with_gradients()
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.refuse(run_of(cluster, "a:2"), code)
    assert kinds(cluster) == [("forward_backward", "b/actor")]
    cluster.execute(run_of(cluster, "b:1"))
    cluster.run_until("a:2")
    run = run_of(cluster, "a:2")
    assert isinstance(run, cmd.OptimStep)
    assert run.stored is None
    assert holder(cluster) == "a/actor"
    cluster.settle()
    assert cluster.wpgs["a/actor"].device == ["a:1", "a:2"]


@pytest.mark.parametrize("was_made", [False, True])
def test_workers_that_are_lost_during_a_step_make_it_once(was_made: bool) -> None:
    cluster = cluster_with_gradients()
    cluster.submit("a:2", "a/actor", "optim_step")
    if was_made:
        cluster.execute(run_of(cluster, "a:2"), report=False)
    cluster.kill("a/actor")
    cluster.settle()
    assert cluster.state_of("a:2") == "finished"
    state = cluster.wpgs["a/actor"]
    assert state.device or state.versions[2] == ["a:1", "a:2"]
    cluster.submit("a:3", "a/actor", "forward")
    cluster.settle()
    assert state.device == ["a:1", "a:2"]


def test_a_router_that_is_lost_during_a_step_asks_for_the_same_one() -> None:
    cluster = cluster_with_gradients()
    cluster.submit("a:2", "a/actor", "optim_step")
    asked = run_of(cluster, "a:2")
    cluster.lose_router()
    cluster.join_router()
    assert run_of(cluster, "a:2") == asked


def test_a_scheduler_that_is_restarted_during_a_step_asks_for_the_same_one() -> None:
    cluster = cluster_with_gradients()
    cluster.submit("a:2", "a/actor", "optim_step")
    asked = run_of(cluster, "a:2")
    cluster.restart_scheduler(restored=True)
    assert run_of(cluster, "a:2") == asked
    cluster.settle()
    assert cluster.state_of("a:2") == "finished"


def test_a_checkpoint_after_a_step_is_of_what_it_made() -> None:
    cluster = cluster_with_gradients()
    cluster.submit("a:2", "a/actor", "optim_step")
    cluster.submit("a:save", "a/actor", "save_checkpoint")
    cluster.execute(run_of(cluster, "a:2"))
    assert kinds(cluster) == [("forward_backward", "b/actor"), ("save_checkpoint", "a/actor")]
    assert run_of(cluster, "a:save").seq == 2


def test_a_holder_leaves_the_last_step_of_its_burst_to_host_memory_if_others_wait() -> None:
    cluster = two_jobs()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.run_until("a:1")
    cluster.submit("a:2", "a/actor", "optim_step", ends_burst=True)
    cluster.submit("b:1", "b/actor", "forward_backward")
    cluster.execute(run_of(cluster, "a:1"))
    assert kinds(cluster) == [("offload", "a/actor")]
    cluster.execute(cluster.runs[0])
    assert kinds(cluster) == [("load", "b/actor"), ("optim_step", "a/actor")]
    assert member(cluster).wpg.residency is Residency.OFFLOADED


@pytest.mark.parametrize("publishes", [False, True])
def test_a_deployment_that_pauses_and_never_publishes_ends_its_bursts_with_a_step(
    publishes: bool,
) -> None:
    cluster = two_jobs()
    for number in range(3):
        cluster.submit(f"a:{number}", "a/actor", "forward_backward")
        cluster.settle()
        cluster.submit(f"s:{number}", "a/actor", "optim_step")
        cluster.settle()
        if publishes:
            cluster.submit(f"p:{number}", "a/actor", "publish")
            cluster.settle()
        cluster.pass_time(600.0)
    cluster.submit("a:last", "a/actor", "forward_backward")
    cluster.run_until("a:last")
    cluster.submit("s:last", "a/actor", "optim_step")
    cluster.submit("b:1", "b/actor", "forward_backward")
    cluster.execute(run_of(cluster, "a:last"))
    kind = "optim_step" if publishes else "offload"
    assert kinds(cluster) == [(kind, "a/actor")]


def test_the_first_step_of_a_declared_cycle_is_made_under_the_lock() -> None:
    """A publish may follow, for which the state would be loaded again."""
    cluster = two_jobs(trace=busy(0.05, period_s=600.0))
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.run_until("a:1")
    cluster.submit("s:1", "a/actor", "optim_step")
    cluster.submit("b:1", "b/actor", "forward_backward")
    cluster.execute(run_of(cluster, "a:1"))
    assert kinds(cluster) == [("optim_step", "a/actor")]
    cluster.submit("p:1", "a/actor", "publish")
    cluster.execute(run_of(cluster, "s:1"))
    assert kinds(cluster) == [("publish", "a/actor")]


@pytest.mark.parametrize(
    ("waits", "fields"), [(False, {"ends_burst": True}), (True, {}), (True, {"ends_burst": True})]
)
def test_other_steps_of_a_burst_are_made_under_the_lock(
    waits: bool, fields: dict[str, bool]
) -> None:
    cluster = two_jobs()
    cluster.submit("a:1", "a/actor", "forward_backward")
    cluster.run_until("a:1")
    cluster.submit("a:2", "a/actor", "optim_step", **fields)
    if waits:
        # What follows in the same burst needs the device anyway.
        cluster.submit("a:3", "a/actor", "forward_backward")
        cluster.submit("b:1", "b/actor", "forward_backward")
    cluster.execute(run_of(cluster, "a:1"))
    run = run_of(cluster, "a:2")
    assert isinstance(run, cmd.OptimStep)
    assert run.stored is None


def test_steps_of_the_stored_state_end_the_cycles_of_a_job_that_never_publishes() -> None:
    cluster = two_jobs()
    for number in range(4):
        cluster.submit(f"a:{number}", "a/actor", "forward_backward")
        cluster.settle()
        cluster.submit(f"b:{number}", "b/actor", "forward_backward")
        cluster.run_until(f"b:{number}")
        cluster.submit(f"s:{number}", "a/actor", "optim_step")
        cluster.execute(run_of(cluster, f"s:{number}"))
        cluster.settle()
    assert len(member(cluster).demand.cycles.measured) >= 2
    assert cluster.core._context.state.jobs[JobId("a")].usage


def test_a_burst_that_leaves_its_step_is_over_and_measured() -> None:
    cluster = two_jobs()
    for number in range(3):
        cluster.submit(f"a:{number}", "a/actor", "forward_backward")
        cluster.run_until(f"a:{number}")
        cluster.submit(f"s:{number}", "a/actor", "optim_step", ends_burst=True)
        cluster.submit(f"b:{number}", "b/actor", "forward_backward")
        cluster.pass_time(10.0)
        cluster.execute(run_of(cluster, f"a:{number}"))
        cluster.settle()
        cluster.pass_time(60.0)
    demand = member(cluster).demand
    assert (demand.burst.cut_s, demand.burst.served) == (0.0, 0)
    assert demand.estimates.burst_seconds == pytest.approx(10.0)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_burst_of_several_steps_is_not_switched_at_each(steps: int) -> None:
    """Both controllers await each result, and the other one always computes."""
    cluster = two_jobs(gpus=2)
    clock, numbers, bursts = Clock(cluster), count(), list[float]()
    for name in ("a/actor", "b/actor"):
        clock.takes(name, forward_backward=5.0, optim_step=1.0, load=1.0, offload=1.0)

    def work(left: int) -> None:
        clock.submit(f"a:{next(numbers)}", "a/actor", "forward_backward", lambda: step(left))

    def step(left: int) -> None:
        def after() -> None:
            if left > 1:
                work(left - 1)
            else:
                bursts.append(cluster.now)
                clock.later(100.0, lambda: work(steps))

        clock.submit(f"a:{next(numbers)}", "a/actor", "optim_step", after)

    def other() -> None:
        clock.submit(f"b:{next(numbers)}", "b/actor", "forward_backward", again)

    def again() -> None:
        clock.later(0.1, other)

    work(steps)
    other()
    # The first burst shows what follows a step.
    clock.run_until(cluster.now + 600.0)
    (group,) = [each for each in cluster.core._context.state.groups.values() if each.shared]
    switches, begun = group.switches, len(bursts)
    clock.run_until(cluster.now + 1000.0)
    assert len(bursts) - begun > 5
    assert group.switches - switches <= 2 * (len(bursts) - begun) + 1
