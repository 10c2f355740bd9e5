"""Whole runs keep all invariants; a history that breaks one is detected with its name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from plexrl.errors import InvariantError
from plexrl.ids import NodeId, OperationId
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.checks.checker import Checker
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import GIB, NodeType, Pool, Scenario
from plexrl.traces import TraceJob
from plexrl.traces.generate.published import MODEL_CLASSES
from plexrl.wire import messages as cmd
from plexrl.wire.operations import OperationKind
from tests.examples import examples


@dataclass(frozen=True, slots=True)
class Jobs:
    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        return iter(self.rows)


def job(index: int, *, gpus: int = 8, cycles: int = 5, model: str = "7B", **more: Any) -> TraceJob:
    demand = MODEL_CLASSES[model].demand()
    return TraceJob(
        job_id=f"job{index}",
        gpus=gpus,
        cycles=cycles,
        **{"submit_s": 40.0 * index, **demand, **more},
    )


def scenario(jobs: tuple[TraceJob, ...], **changes: Any) -> Scenario:
    plain = Scenario(source=Jobs(jobs), pools=(Pool(nodes=2),), policy="pack", switch_s=8.0)
    return replace(plain, **changes)


@dataclass(frozen=True, slots=True)
class Entry:
    """An event and the core's commands."""

    event: ev.Event
    commands: tuple[cmd.Command, ...]
    now: float


History = list[Entry]

SHARED = scenario((*(job(index) for index in range(4)), job(4, gpus=4)))
"""Several jobs on one group of 8 GPUs, taking turns, and one on another."""


@cache
def recorded() -> tuple[Entry, ...]:
    """A run in which a worker is lost in the midst of an operation."""
    run = TraceRun(SHARED)
    history: History = []
    run.shell.observe(
        lambda event, commands, now: history.append(Entry(event, tuple(commands), now))
    )
    run.start()
    run.shell.at(1000.0, lambda _: run.lose_worker(_running(history), 3))
    while run.shell.run(1000) == 1000:
        pass
    run.check_it_ended()
    return tuple(history)


def _running(history: History) -> str:
    """A deployment with an operation of its own under way."""
    runs: dict[str, cmd.Run] = {}
    for entry in history:
        if isinstance(entry.event, ev.OperationFinished):
            runs.pop(entry.event.operation)
        runs |= {each.operation: each for each in commands_of(entry, cmd.Run)}
    return str(next(each.deployment for each in runs.values() if each.kind in USER_KINDS))


USER_KINDS = (OperationKind.FORWARD, OperationKind.OPTIM_STEP, OperationKind.FORWARD_BACKWARD)


def commands_of(entry: Entry, kind: type[cmd.Command]) -> list[Any]:
    return [each for each in entry.commands if isinstance(each, kind)]


def check(history: History) -> Checker:
    checker = Checker(SHARED)
    for entry in history:
        checker.observe(entry.event, entry.commands, entry.now)
    checker.finish(history[-1].now)
    return checker


def find(history: History, wanted: Callable[[Entry], Any], after: int = 0) -> int:
    return next(at for at, each in enumerate(history) if at >= after and wanted(each))


def with_run(kind: OperationKind) -> Callable[[Entry], Any]:
    return lambda entry: [each for each in commands_of(entry, cmd.Run) if each.kind == kind]


def changed_command(history: History, at: int, old: cmd.Command, **changes: Any) -> None:
    new = tuple(
        structs.replace(each, **changes) if each is old else each for each in history[at].commands
    )
    history[at] = replace(history[at], commands=new)


def changed_event(history: History, at: int, **changes: Any) -> None:
    history[at] = replace(history[at], event=structs.replace(history[at].event, **changes))


def first_event(history: History, kind: type[ev.Event], after: int = 0) -> int:
    return find(history, lambda entry: isinstance(entry.event, kind), after)


# What a mutation does to a history that keeps the laws, and the law that it breaks.


def one_gpu_twice(history: History) -> None:
    at = find(history, lambda entry: commands_of(entry, cmd.LaunchWorkers))
    launch = commands_of(history[at], cmd.LaunchWorkers)[0]
    ranks = (*launch.ranks[:-1], structs.replace(launch.ranks[0], rank=launch.ranks[-1].rank))
    changed_command(history, at, launch, ranks=ranks)


def a_gpu_that_no_node_has(history: History) -> None:
    changed_event(history, first_event(history, ev.NodeJoined), gpus=4)


def a_node_that_never_came(history: History) -> None:
    del history[first_event(history, ev.NodeJoined)]


def more_nodes_than_the_cluster_has(history: History) -> None:
    at = first_event(history, ev.NodeJoined)
    joined = history[at].event
    assert isinstance(joined, ev.NodeJoined)
    history.insert(
        at, replace(history[at], event=structs.replace(joined, node=NodeId("more")), commands=())
    )


def states_larger_than_the_node(history: History) -> None:
    changed_event(history, first_event(history, ev.NodeJoined), host_memory_bytes=GIB, nvme_bytes=0)


def a_state_larger_than_the_gpus(history: History) -> None:
    changed_event(history, first_event(history, ev.NodeJoined), gpu_memory_bytes=GIB)


def an_exclusive_job_shares(history: History) -> None:
    changed_event(history, first_event(history, ev.DeploymentCreated), exclusive=True)


def another_type_of_node(history: History) -> None:
    changed_event(history, first_event(history, ev.DeploymentCreated), node_type="other")


def two_deployments_at_once(history: History) -> None:
    """A load is issued while the offload before it still runs."""
    offload_at = find(history, with_run(OperationKind.OFFLOAD))
    at = find(history, with_run(OperationKind.LOAD), offload_at)
    load = with_run(OperationKind.LOAD)(history[at])[0]
    kept = tuple(each for each in history[at].commands if each is not load)
    history[at] = replace(history[at], commands=kept)
    before = history[offload_at]
    history[offload_at] = replace(before, commands=(*before.commands, load))


def the_state_of_another(history: History) -> None:
    """The second job's load is left out."""
    first = find(history, with_run(OperationKind.LOAD))
    at = find(history, with_run(OperationKind.LOAD), first + 1)
    load = with_run(OperationKind.LOAD)(history[at])[0]
    kept = tuple(each for each in history[at].commands if each is not load)
    history[at] = replace(history[at], commands=kept)
    end = find(history, lambda e: getattr(e.event, "operation", "") == load.operation)
    history[end] = replace(history[end], event=ev.TimerFired())


def an_operation_never_ends(history: History) -> None:
    last = max(
        at
        for at, each in enumerate(history)
        if isinstance(each.event, ev.OperationFinished) and "#" not in each.event.operation
    )
    entry = history[last]
    kept = replace(entry, event=ev.TimerFired())
    history[last] = kept


def an_operation_ends_twice(history: History) -> None:
    at = first_event(history, ev.OperationFinished)
    history.insert(at + 1, replace(history[at], commands=()))


def a_run_says_it_took_longer(history: History) -> None:
    changed_event(history, first_event(history, ev.OperationFinished), compute_s=1e4)


def a_run_of_what_nobody_submitted(history: History) -> None:
    at = first_event(history, ev.OperationSubmitted)
    history[at] = replace(history[at], event=ev.TimerFired())


def an_operation_runs_twice(history: History) -> None:
    at = find(history, with_run(OperationKind.OPTIM_STEP))
    run = with_run(OperationKind.OPTIM_STEP)(history[at])[0]
    end = find(history, lambda e: getattr(e.event, "operation", "") == run.operation, at + 1)
    entry = history[end]
    history[end] = replace(entry, commands=(run, *entry.commands))


def an_operation_is_submitted_twice(history: History) -> None:
    at = find(history, lambda e: isinstance(e.event, ev.OperationSubmitted) and not e.commands)
    history.insert(at, replace(history[at], commands=()))


def an_operation_overtakes_another(history: History) -> None:
    at = first_event(history, ev.OperationSubmitted)
    submitted = history[at].event
    assert isinstance(submitted, ev.OperationSubmitted)
    earlier = structs.replace(submitted, operation=OperationId("earlier"))
    history.insert(at, replace(history[at], event=earlier, commands=()))


def a_repetition_for_no_reason(history: History) -> None:
    at = find(history, with_run(OperationKind.OPTIM_STEP))
    changed_command(history, at, with_run(OperationKind.OPTIM_STEP)(history[at])[0], replay=True)


def workers_stopped_in_the_midst(history: History) -> None:
    at = first_event(history, ev.WorkerExited)
    history[at] = replace(history[at], event=ev.TimerFired())


def an_event_in_the_past(history: History) -> None:
    at = first_event(history, ev.OperationFinished)
    history[at] = replace(history[at], now=history[at - 1].now - 1e-3)


def a_token_that_goes_back(history: History) -> None:
    first = find(history, with_run(OperationKind.OFFLOAD))
    at = find(history, with_run(OperationKind.OPTIM_STEP), first)
    changed_command(history, at, with_run(OperationKind.OPTIM_STEP)(history[at])[0], token=0)


def an_offload_that_fences_nothing(history: History) -> None:
    at = find(history, with_run(OperationKind.OFFLOAD))
    offload = with_run(OperationKind.OFFLOAD)(history[at])[0]
    changed_command(history, at, offload, token=offload.token - 1)


def an_end_under_another_token(history: History) -> None:
    changed_event(history, first_event(history, ev.OperationFinished), token=77)


def a_run_before_the_workers_are_there(history: History) -> None:
    at = first_event(history, ev.WorkerReady)
    history[at] = replace(history[at], event=ev.TimerFired())


def workers_that_were_never_launched(history: History) -> None:
    changed_event(history, first_event(history, ev.WorkerReady), incarnation=9)


def a_job_that_nobody_submitted(history: History) -> None:
    at = first_event(history, ev.JobSubmitted)
    history[at] = replace(history[at], event=ev.TimerFired())


def a_job_that_never_ends(history: History) -> None:
    last = max(at for at, each in enumerate(history) if isinstance(each.event, ev.JobFinished))
    history[last] = replace(history[last], event=ev.TimerFired(), commands=())


MUTATIONS: dict[str, tuple[Callable[[History], None], ...]] = {
    "over-commit": (
        one_gpu_twice,
        a_gpu_that_no_node_has,
        a_node_that_never_came,
        more_nodes_than_the_cluster_has,
        states_larger_than_the_node,
        a_state_larger_than_the_gpus,
        an_exclusive_job_shares,
        another_type_of_node,
        two_deployments_at_once,
        the_state_of_another,
    ),
    "conservation": (
        an_operation_never_ends,
        a_run_says_it_took_longer,
        a_run_of_what_nobody_submitted,
        an_operation_runs_twice,
        an_operation_is_submitted_twice,
        a_repetition_for_no_reason,
        workers_stopped_in_the_midst,
        a_job_that_never_ends,
    ),
    "causality": (
        an_operation_ends_twice,
        an_operation_overtakes_another,
        an_event_in_the_past,
        a_token_that_goes_back,
        an_offload_that_fences_nothing,
        an_end_under_another_token,
        a_run_before_the_workers_are_there,
        workers_that_were_never_launched,
        a_job_that_nobody_submitted,
    ),
}


def test_the_recorded_history_keeps_the_invariants_and_leaves_nothing() -> None:
    history = list(recorded())
    assert any(isinstance(each.event, ev.WorkerExited) for each in history)
    assert len([each for each in history if with_run(OperationKind.OFFLOAD)(each)]) > 10
    checker = check(history)
    assert (checker._jobs, checker._deployments, checker._running) == ({}, {}, {})
    assert not any(checker._occupancy._residents)
    assert not checker._gpu_states.runner.any()
    assert not checker._gpu_states.resident.any()


@pytest.mark.parametrize(
    ("law", "mutate"),
    [(law, mutate) for law, mutations in MUTATIONS.items() for mutate in mutations],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_broken_invariant_is_caught(law: str, mutate: Callable[[History], None]) -> None:
    history = list(recorded())
    mutate(history)
    with pytest.raises(InvariantError) as caught:
        check(history)
    assert caught.value.details["law"] == law, caught.value.message
    at_s = caught.value.details["at_s"]
    assert f"at {at_s!r} s" in caught.value.message


def test_an_answer_of_another_time_is_caught() -> None:
    checker = Checker(SHARED)
    checker.event(ev.TimerFired(), 1.0)
    with pytest.raises(InvariantError, match="the commands for TimerFired come at"):
        checker.commands(ev.TimerFired(), (), 2.0)


def test_what_ran_is_what_was_drawn() -> None:
    history = list(recorded())
    end = first_event(history, ev.JobFinished)
    finished = history[end].event
    assert isinstance(finished, ev.JobFinished)
    checker = Checker(SHARED)
    for entry in history[:end]:
        checker.observe(entry.event, entry.commands, entry.now)
    checker.drawn(finished.job, 1.0)
    with pytest.raises(InvariantError, match=r"its cycles were drawn with 1\.0 s"):
        checker.event(finished, history[end].now)


def test_a_job_is_given_up_for_a_reason() -> None:
    history = list(recorded())
    checker = Checker(SHARED)
    at = first_event(history, ev.DeploymentCreated)
    for entry in history[: at + 1]:
        checker.observe(entry.event, entry.commands, entry.now)
    created = history[at].event
    assert isinstance(created, ev.DeploymentCreated)
    with pytest.raises(InvariantError, match="none of its workers was lost"):
        checker.job_failed(created.job)
    checker.job_failed("unknown")


def test_a_core_whose_own_invariants_are_broken_is_caught() -> None:
    run = TraceRun(SHARED)
    run.start()
    run.shell.run(60)
    core = run.shell.core
    checker = Checker(SHARED, core)
    checker.finish(run.shell.now)
    group = next(iter(core._context.state.groups.values()))
    group.holder = "stranger"  # type: ignore[assignment]
    with pytest.raises(InvariantError, match="held by a stranger") as caught:
        checker.finish(run.shell.now)
    assert caught.value.details["law"] == "core"


@pytest.mark.parametrize("policy", sorted(SIM_POLICIES))
def test_every_policy_keeps_the_invariants_and_checking_changes_nothing(policy: str) -> None:
    jobs = (*(job(index) for index in range(6)), *(job(6 + i, gpus=4) for i in range(3)))
    plain = scenario(jobs, policy=policy)
    found, checked = simulate(plain), simulate(replace(plain, check=True))
    assert replace(checked, speed=found.speed) == found


JOBS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 4, 8, 16]),
        st.integers(1, 4),
        st.sampled_from(["7B", "30B"]),
        st.integers(0, 1),
        st.floats(0, 300),
    ),
    min_size=1,
    max_size=7,
)


@given(
    jobs=JOBS,
    policy=st.sampled_from(sorted(SIM_POLICIES)),
    detail=st.sampled_from(["burst", "operation"]),
    warm=st.booleans(),
    seed=st.integers(0, 3),
)
# The largest job waits for two groups, and who goes first in one of them changes meanwhile.
@example(
    jobs=[(2, 1, "7B", 0, 0.0), (1, 1, "7B", 0, 0.0), (1, 1, "7B", 0, 0.0)],
    policy="hrrs-literal",
    detail="operation",
    warm=True,
    seed=0,
)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_small_cluster_keeps_the_invariants_and_its_bound(
    jobs: list[tuple[int, int, str, int, float]], policy: str, detail: str, warm: bool, seed: int
) -> None:
    submitted = 0.0
    rows = []
    for index, (gpus, cycles, model, staleness, after_s) in enumerate(jobs):
        submitted += after_s
        rows.append(
            job(
                index,
                gpus=gpus,
                cycles=cycles,
                model=model,
                staleness=staleness,
                submit_s=submitted,
                state_bytes=20 * gpus * GIB,
                tenant=f"tenant{index % 2}",
            )
        )
    pools = (Pool(nodes=2), Pool(nodes=1, node_type=NodeType(name="small", gpus=4)))
    found = simulate(
        scenario(
            tuple(rows), pools=pools, policy=policy, detail=detail, warm=warm, seed=seed, check=True
        )
    )
    assert (found.jobs, found.failed_jobs) == (len(rows), 0)
    assert found.cycles == sum(row.cycles or 0 for row in rows)
    assert found.drain_s >= found.bounds.bound_s - 1e-6
    assert found.busy_gpu_hours <= found.training_gpu_hours + 1e-9
    assert sum(tenant.jobs for tenant in found.tenants) == len(rows)
