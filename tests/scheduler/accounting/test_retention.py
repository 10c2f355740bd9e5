"""Ended jobs above a limit are dropped, and no decision depends on dropped jobs."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from plexrl import errors
from plexrl.scheduler.accounting.retention import last_incarnation, retire
from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.queries.views import operation_log
from plexrl.scheduler.state.messages import events as ev
from plexrl.scheduler.state.messages.calls import ListOperations
from plexrl.scheduler.state.messages.effects import TIMERS_MIN
from plexrl.scheduler.state.records import State
from plexrl.wire import messages as cmd
from tests.examples import examples
from tests.scheduler.fake_cluster import FakeCluster, config

KINDS = ("forward", "forward_backward", "optim_step")


def after(jobs: int, ended_jobs: int) -> FakeCluster:
    """A cluster on which so many jobs have run and ended, one after the other."""
    cluster = FakeCluster(ended_jobs=ended_jobs)
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="k"))
    for number in range(jobs):
        cluster.job(f"j{number}")
        cluster.deploy(f"j{number}/actor")
        for kind in KINDS:
            cluster.submit(f"j{number}:{kind}", f"j{number}/actor", kind)
        cluster.settle()
        cluster.pass_time(1.0)
        cluster.send(ev.JobFinished(job=f"j{number}", outcome="completed"))
    return cluster


def test_of_a_forgotten_job_nothing_is_known_but_its_tenant_s_totals() -> None:
    cluster, whole = after(5, ended_jobs=2), after(5, ended_jobs=100)
    core, now = cluster.core, cluster.now
    assert [job["job"] for job in core.list_jobs(None, now)] == ["j3", "j4"]
    with pytest.raises(errors.UnknownJobError):
        core.job_view("j0", now)
    with pytest.raises(errors.UnknownDeploymentError):
        core.deployment_view("j0/actor", now)
    with pytest.raises(errors.UnknownOperationError):
        core.operation_view("j0:optim_step", now)
    assert core.operation_view("j4:optim_step", now)["state"] == "finished"
    rows = operation_log(core.cluster, None, ListOperations(after=0, limit=100), now)
    assert {row["job"] for row in rows} == {"j3", "j4"}
    for tenant in (None, "t"):
        assert core.status(now, tenant) == whole.core.status(now, tenant)
    assert core.list_tenants(now) == whole.core.list_tenants(now)


def test_the_id_of_a_forgotten_job_can_be_used_again() -> None:
    cluster = after(3, ended_jobs=1)
    cluster.job("j0")
    cluster.deploy("j0/actor")
    cluster.submit("again", "j0/actor", "forward")
    cluster.settle()
    assert cluster.state_of("again") == "finished"


def test_a_job_that_takes_a_forgotten_id_has_nothing_of_the_former_one() -> None:
    cluster = after(3, ended_jobs=1)
    cluster.pass_time(1.0)
    cluster.job("j0", tenant="another")
    cluster.deploy("j0/actor")
    with pytest.raises(errors.UnknownOperationError):
        cluster.core.operation_view("j0:forward", cluster.now)
    wanted = ListOperations(after=0, limit=100)
    assert operation_log(cluster.core.cluster, "another", wanted, cluster.now) == []
    with pytest.raises(errors.ConflictError, match="former job"):
        cluster.submit("j0:forward", "j0/actor", "forward")
    cluster.submit("again", "j0/actor", "forward")
    cluster.settle()
    rows = operation_log(cluster.core.cluster, "another", wanted, cluster.now)
    assert "again" in {row["operation"] for row in rows}
    assert not {row["operation"] for row in rows} & {f"j0:{kind}" for kind in KINDS}


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_report_of_a_forgotten_job_s_run_changes_nothing(is_taken: bool) -> None:
    cluster = FakeCluster(ended_jobs=1)
    cluster.start_node()
    cluster.job("j0")
    cluster.deploy("j0/actor")
    cluster.submit("slow", "j0/actor", "forward")
    while not any(run.operation == "slow" for run in cluster.runs):
        if cluster.launches:
            cluster.launch(cluster.launches[0])
        else:
            cluster.execute(cluster.runs[0])
    slow = next(run for run in cluster.runs if run.operation == "slow")
    cluster.send(ev.JobFinished(job="j0", outcome="cancelled"))
    cluster.job("j1")
    cluster.send(ev.JobFinished(job="j1", outcome="completed"))
    assert [job["job"] for job in cluster.core.list_jobs(None, cluster.now)] == ["j1"]
    cluster.pass_time(1.0)
    if is_taken:
        cluster.job("j0")
        cluster.deploy("j0/actor")
    before = cluster.core.dump()
    late = {"operation": "slow", "token": slow.token}
    cluster.send(ev.OperationFinished(**late, compute_s=0.1))
    error = errors.ExecutionError("no").to_wire()
    cluster.send(ev.OperationFailed(**late, error=error, state_intact=False))
    assert cluster.core.dump() == before


def test_a_restart_forgets_what_was_forgotten() -> None:
    cluster = after(4, ended_jobs=2)
    cluster.restart_scheduler(restored=True)
    assert [job["job"] for job in cluster.core.list_jobs(None, cluster.now)] == ["j2", "j3"]
    cluster.restart_scheduler()


def test_timers_of_jobs_that_have_ended_do_not_pile_up() -> None:
    core = SchedulerCore(config(ended_jobs=1))
    for number in range(3 * TIMERS_MIN):
        submitted = ev.JobSubmitted(
            job=f"j{number}",
            tenant="t",
            name="j",
            controller_timeout_s=1e6,
            reattach_timeout_s=1e6,
        )
        core.handle(submitted, float(number))
        core.handle(ev.JobFinished(job=f"j{number}", outcome="completed"), float(number))
    assert len(core._context.effects.timers) <= TIMERS_MIN + 2


@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    policy=st.sampled_from(("pack", "spread", "spread+backfill", "co-execution")),
)
def test_commands_are_the_same_however_little_is_remembered(seed: int, policy: str) -> None:
    random, live, made = Random(seed), [], 0
    cluster = FakeCluster(policy=policy, residents_max=2)
    cluster.start_node()
    cluster.send(ev.TenantCreated(tenant="t", key_digest="k"))
    for _ in range(40):
        choice = random.random()
        if choice < 0.3:
            live.append(f"j{made}")
            made += 1
            cluster.job(live[-1], tenant=random.choice(("t", "other")))
            cluster.deploy(f"{live[-1]}/actor", workers=random.choice((1, 2, 4)))
        elif choice < 0.6 and live:
            job = random.choice(live)
            for kind in KINDS:
                cluster.submit(f"{job}:{len(cluster.journal)}", f"{job}/actor", kind)
        elif choice < 0.75 and live:
            job = live.pop(random.randrange(len(live)))
            cluster.send(ev.JobFinished(job=job, outcome="completed"))
        elif choice < 0.85:
            cluster.pass_time(random.choice((0.1, 5.0, 100.0)))
        for _ in range(random.randrange(6)):
            if cluster.launches:
                cluster.launch(random.choice(cluster.launches))
            elif cluster.runs:
                cluster.execute(random.choice(cluster.runs))
    long = SchedulerCore(config(policy=policy, residents_max=2))
    short = SchedulerCore(config(policy=policy, residents_max=2, ended_jobs=1))
    for event, at in cluster.journal:
        assert short.handle(event, at) == long.handle(event, at)
        short.check_invariants()
    assert short.list_tenants(cluster.now) == long.list_tenants(cluster.now)


def test_workers_of_a_forgotten_job_are_not_those_of_the_one_that_has_its_id() -> None:
    cluster = after(3, ended_jobs=1)
    cluster.job("j0")
    cluster.deploy("j0/actor")
    (launch,) = cluster.launches
    before = cluster.core.dump()
    late = {"deployment": "j0/actor", "rank": 0, "incarnation": 1}
    cluster.send(ev.WorkerReady(**late, address="former"))
    cluster.send(ev.WorkerExited(**late, reason="stopped"))
    assert cluster.core.dump() == before
    # On a node that comes back with such a worker it is stopped, and the wanted one is launched.
    cluster.launches.clear()
    seen = ev.WorkerSeen(**late, address="former")
    commands = cluster.send(replace(cluster.nodes["n"], workers=(seen,)))
    assert cluster.launches == [launch]
    stopped = [each for each in commands if isinstance(each, cmd.StopWorkers)]
    assert [each.incarnation for each in stopped] == [1]
    assert launch.incarnation == 2
    cluster.settle()
    assert cluster.core.deployment_view("j0/actor", cluster.now)["state"] == "ready"


def test_workers_count_on_however_long_ago_their_forerunners_were_forgotten() -> None:
    state = State()
    for number in range(10):
        retire(state, f"d{number}", incarnation=1 + number % 4, kept=3)
    retire(state, "d8", incarnation=7, kept=3)
    assert state.retired == {"d7": 4, "d9": 2, "d8": 7}
    assert last_incarnation(state, "d8") == 7
    assert last_incarnation(state, "d2") == last_incarnation(state, "never was") == 4


def measure(cluster: FakeCluster, name: str) -> None:
    """A job that runs until its profile is known."""
    cluster.job(name)
    cluster.deploy(f"{name}/actor")
    for cycle in range(5):
        cluster.submit(f"{name}:{cycle}", f"{name}/actor", "optim_step")
        while cluster.launches:
            cluster.launch(cluster.launches[0])
        while cluster.runs:
            cluster.pass_time(1.0)
            cluster.execute(cluster.runs[0])
        cluster.pass_time(9.0)
    cluster.send(ev.JobFinished(job=name, outcome="completed"))


def test_a_job_that_comes_again_has_its_profile_unless_others_came_since() -> None:
    cluster = FakeCluster(policy="spread", profile_cycles=2, profiles=2, ended_jobs=1)
    cluster.start_node()
    for name in ("a", "b", "c", "d"):
        measure(cluster, name)
    for name, is_known in (("b", False), ("c", True)):
        cluster.job(name)
        cluster.deploy(f"{name}/actor")
        (told,) = cluster.core.explain_job(name, cluster.now)["deployments"]
        assert (told["profile"] is not None) == is_known, name


def test_profiles_beyond_a_lowered_bound_are_forgotten_with_the_next_one() -> None:
    cluster = FakeCluster(policy="spread", profile_cycles=2, profiles=9, ended_jobs=1)
    cluster.start_node()
    for name in ("a", "b", "c", "d"):
        measure(cluster, name)
    cluster.send(ev.SchedulerStarted(settings={"profiles": 2}))
    cluster.join_node()
    cluster.join_router()
    measure(cluster, "e")
    profiles = cluster.core._context.state.profiles
    assert [key.split("/")[1] for key in profiles] == ["d", "e"]


def test_the_length_of_a_job_that_never_had_gpus_is_not_remembered() -> None:
    cluster = FakeCluster()
    cluster.start_node(2)
    for job in ("has them", "waits"):
        cluster.job(job)
        cluster.deploy(f"{job}/actor", workers=2, exclusive=True)
    cluster.pass_time(100.0)
    for job, known in (("waits", 0), ("has them", 1)):
        cluster.send(ev.JobFinished(job=job, outcome="completed"))
        assert len(cluster.core.cluster.state.lengths) == known
