"""Properties of every run, checked against simple models that share no code."""

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.core.core import SchedulerCore
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim import virtual_config
from plexrl.sim.engine.simulate import simulate
from plexrl.sim.engine.trace_run import RETENTION, TraceRun
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.job_run import JobRun
from plexrl.sim.workload.policies import POLICY_NAMES, SIM_POLICIES, UNSHARED, sim_policy
from plexrl.sim.workload.scenario import ROLLOUT_GPUS, Behaviour, NodeType, Pool, Scenario
from plexrl.traces import TraceJob, TraceSegment
from plexrl.traces.generate.published import MODEL_CLASSES
from tests.examples import examples

if TYPE_CHECKING:
    from plexrl.wire import messages as cmd

OLD = Pool(nodes=2, node_type=NodeType(name="old", speed=0.5))


@dataclass(frozen=True, slots=True)
class Jobs:
    """A source of jobs in memory."""

    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        return iter(self.rows)


def plain(result: SimResult) -> str:
    """The deterministic part of a result."""
    return repr(
        replace(result, speed=replace(result.speed, wall_s=0, events_per_s=0, peak_bytes=0))
    )


@st.composite
def segments(draw: st.DrawFn) -> tuple[float, tuple[TraceSegment, ...]]:
    """(period, segments) of a cycle that begins with its rollout."""
    at_s = draw(st.floats(1.0, 300.0))
    found = []
    names = draw(st.lists(st.sampled_from(["log_prob", "update", "sync", "critic"]), max_size=4))
    for name in (*names, "update"):
        length_s = draw(st.floats(0.5, 60.0))
        found.append(TraceSegment(function=name, offset_s=at_s, duration_s=length_s))
        at_s += length_s + draw(st.sampled_from([0.0, 0.0, 5.0]))
    return at_s + draw(st.sampled_from([0.0, 20.0])), tuple(found)


@st.composite
def trace_jobs(draw: st.DrawFn) -> tuple[TraceJob, ...]:
    found = []
    submit_s = 0.0
    for index in range(draw(st.integers(1, 6))):
        period_s, busy = draw(segments())
        submit_s += draw(st.sampled_from([0.0, 1.0, 300.0]))
        found.append(
            TraceJob(
                job_id=f"job{index}",
                submit_s=submit_s,
                gpus=draw(st.sampled_from([1, 4, 8, 16])),
                tenant=draw(st.sampled_from(["a", "b"])),
                cycles=draw(st.integers(1, 6)),
                node_type=draw(st.sampled_from(["", "", "old", "unheard-of"])),
                state_bytes=8 << 30,
                period_s=period_s,
                jitter_s=draw(st.sampled_from([0.0, 0.15])) * period_s,
                segments=busy,
                staleness=draw(st.integers(0, 2)),
                priority=draw(st.integers(-1, 1)),
            )
        )
    return tuple(found)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    return Scenario(
        source=Jobs(draw(trace_jobs())),
        pools=(Pool(nodes=draw(st.integers(2, 4))), OLD)[: draw(st.integers(1, 2))],
        policy=draw(st.sampled_from(sorted(SIM_POLICIES))),
        seed=draw(st.integers(0, 5)),
        switch_s=draw(st.sampled_from([None, 8.0])),
        detail=draw(st.sampled_from(["burst", "operation"])),
        warm=draw(st.booleans()),
        check=draw(st.booleans()),
    )


class EventLog:
    """Every event of a run with its time and commands."""

    def __init__(self, scenario: Scenario) -> None:
        self.run = TraceRun(scenario)
        self.entries: list[tuple[ev.Event, list[cmd.Command], float]] = []
        self.run.shell.observe(lambda *each: self.entries.append(each))
        self.run.start()
        while self.run.shell.run(1000) == 1000:
            pass
        self.run.check_it_ended()


@settings(max_examples=examples(25), deadline=None)
@given(scenarios())
def test_every_cycle_runs_once_and_equal_scenarios_have_equal_results(scenario: Scenario) -> None:
    rows = scenario.source.rows  # type: ignore[attr-defined]
    log = EventLog(scenario)
    submitted = Counter(
        e.operation for e, _, _ in log.entries if isinstance(e, ev.OperationSubmitted)
    )
    finished = Counter(
        e.operation
        for e, _, _ in log.entries
        if isinstance(e, ev.OperationFinished) and "#" not in e.operation
    )
    assert submitted == finished
    assert set(submitted.values()) <= {1}
    per_job = Counter(
        operation.split(":")[0] for operation in submitted if operation.endswith(":0")
    )
    assert per_job == {f"j{index + 1}": job.cycles for index, job in enumerate(rows)}
    log.run.shell.core.check_invariants()
    result = simulate(scenario)
    assert (result.jobs, result.failed_jobs) == (len(rows), 0)
    assert result.cycles == sum(job.cycles for job in rows)
    assert plain(simulate(scenario)) == plain(result)


@settings(max_examples=examples(15), deadline=None)
@given(scenarios())
def test_the_events_give_a_second_core_the_same_commands(scenario: Scenario) -> None:
    log = EventLog(scenario)
    settings_of_policy = {**RETENTION, **sim_policy(scenario.policy).settings}
    second = SchedulerCore(virtual_config(**settings_of_policy))
    for event, commands, now in log.entries:
        again = ev.CODEC.decode(ev.CODEC.encode(event))
        assert second.handle(again, now) == commands


@settings(max_examples=examples(25), deadline=None)
@given(trace_jobs(), st.sampled_from(["burst", "operation"]), st.booleans())
def test_alone_nobody_is_slowed_down(
    rows: tuple[TraceJob, ...], detail: str, isolated: bool
) -> None:
    """Alone on the cluster, or each on a group of its own that is always free."""
    policy = "isolated" if isolated else "spread+backfill"
    jobs = Jobs(rows if isolated else rows[:1])
    cycles: list[tuple[float, float]] = []
    result = simulate(
        Scenario(source=jobs, pools=(Pool(nodes=12),), policy=policy, detail=detail),  # type: ignore[arg-type]
        on_cycle=lambda _, took_s, alone_s: cycles.append((took_s, alone_s)),
    )
    assert result.switches == 0
    assert result.wait.highest == 0.0
    assert result.jobs_over_slo == 0
    # The first load and snapshots, which `alone_s` contains, are all that comes on top of cycles.
    assert [took_s for took_s, _ in cycles] == pytest.approx([alone_s for _, alone_s in cycles])


def rules_in(case: Scenario) -> Scenario:
    """`case` under a rule of batch systems, if it knows none of what the rule does not."""
    return replace(case, policy=UNSHARED[case.seed % 2], pools=case.pools[:1])


@settings(max_examples=examples(50), deadline=None)
@given(scenarios(), st.booleans(), st.sampled_from(ROLLOUT_GPUS))
def test_no_policy_drains_before_the_bound_and_no_job_is_faster_than_alone(
    scenario: Scenario, is_unshared: bool, rollouts: str
) -> None:
    """The bound and a job's time alone contain nothing that a policy can avoid."""
    drawn: tuple[TraceJob, ...] = scenario.source.rows  # type: ignore[attr-defined]
    rows = tuple(
        # Work for snapshots by time, equal sizes and cycles, and rollouts that may be placed.
        replace(
            job,
            cycles=20 + (job.cycles or 1),
            gpus=8,
            rollout_gpus=4 if index % 3 else 8,
            state_bytes=800 << 30,
            period_s=drawn[0].period_s,
            segments=drawn[0].segments,
        )
        for index, job in enumerate(drawn)
    )
    scenario = replace(scenario, source=Jobs(rows), rollouts=rollouts, check=True, switch_s=None)  # type: ignore[arg-type]
    if is_unshared:
        scenario = rules_in(replace(scenario, rollouts="own" if rollouts == "own" else "outside"))
    result = simulate(scenario)
    assert result.bounds.bound_s <= result.drain_s * (1 + 1e-9)
    slowdowns = [result.job_slowdown]
    if not any(job.staleness for job in rows):
        # A cycle of an asynchronous job may catch up after a delay.
        slowdowns.append(result.cycle_slowdown)
    for slowdown in slowdowns:
        assert all(value >= -1e-9 for value, _ in slowdown.cdf)
        assert slowdown.mean >= -1e-9


def test_a_switch_in_time_for_a_snapshot_does_not_beat_the_bound() -> None:
    """Switches make versions, so shared jobs need fewer snapshots than a job alone."""
    busy = (TraceSegment(function="update", offset_s=250.0, duration_s=120.0),)
    rows = tuple(
        TraceJob(
            job_id=f"job{index}",
            submit_s=30.0 * index,
            gpus=8,
            cycles=cycles,
            state_bytes=800 << 30,
            period_s=370.0,
            segments=busy,
        )
        for index, cycles in enumerate((40, 38))
    )
    for policy in POLICY_NAMES:
        scenario = Scenario(source=Jobs(rows), pools=(Pool(nodes=2),), policy=policy)
        for case in (scenario, replace(scenario, pools=(Pool(nodes=1),))):
            result = simulate(case)
            assert result.bounds.bound_s <= result.drain_s * (1 + 1e-9), policy
            assert all(value >= -1e-9 for value, _ in result.job_slowdown.cdf), policy


@settings(max_examples=examples(20), deadline=None)
@given(trace_jobs())
def test_rollouts_that_run_further_ahead_never_make_a_job_later(
    rows: tuple[TraceJob, ...],
) -> None:
    ends = []
    for staleness in (0, 1, 2):
        scenario = Scenario(
            source=Jobs(rows[:1]),
            pools=(Pool(nodes=2),),
            policy="isolated",
            behaviour=Behaviour(staleness=staleness),
        )
        ends.append(simulate(scenario).drain_s)
    assert ends[1] <= ends[0] + 1e-6
    assert ends[2] <= ends[1] + 1e-6


def first_come_first_served(
    rows: tuple[TraceJob, ...], gpus: int, launch_s: float, load_s: float, controller_s: float
) -> list[float]:
    """When each job ends that has its GPUs to itself, on a cluster of equal nodes that are given
    whole, written down as plainly as can be: minute hands, no heap, no scheduler."""
    free, ends, running = gpus, [0.0] * len(rows), dict[int, float]()
    waiting = list(range(len(rows)))
    now = 0.0
    while waiting or running:
        for index in [i for i in running if ends[i] <= now]:
            free += rows[index].gpus
            del running[index]
        for index in list(waiting):
            job = rows[index]
            if job.submit_s > now or job.gpus > free:
                continue
            assert job.cycles is not None
            assert job.period_s is not None
            end = now + launch_s + load_s
            idle_s = job.period_s - sum(each.duration_s for each in job.segments)
            for _ in range(job.cycles):
                end += idle_s + sum(each.duration_s for each in job.segments) + controller_s
            ends[index] = end - controller_s
            running[index] = ends[index]
            free -= job.gpus
            waiting.remove(index)
        times = [*running.values(), *(rows[i].submit_s for i in waiting if rows[i].submit_s > now)]
        if times:
            now = min(times)
    return ends


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from([0.0, 7.0, 400.0]), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    )
)
def test_isolated_jobs_of_one_size_end_when_a_plain_queue_says(
    drawn: list[tuple[int, float, int]],
) -> None:
    at_s, found = 0.0, []
    for index, (work, gap_s, cycles) in enumerate(drawn):
        at_s += gap_s
        busy = (TraceSegment(function="update", offset_s=30.0, duration_s=10.0 * work),)
        found.append(
            TraceJob(
                job_id=f"job{index}",
                submit_s=at_s,
                gpus=8,
                cycles=cycles,
                state_bytes=8 << 30,
                period_s=30.0 + 10.0 * work,
                segments=busy,
            )
        )
    rows = tuple(found)
    # With a bound of 0 s, jobs that wait go by their times of submission, not by their lengths.
    scenario = Scenario(
        source=Jobs(rows),
        pools=(Pool(nodes=2),),
        policy="isolated",
        switch_s=8.0,
        starvation_bound_s=0.0,
    )
    log = EventLog(scenario)
    ended = {
        str(event.job): now for event, _, now in log.entries if isinstance(event, ev.JobFinished)
    }
    expected = first_come_first_served(
        rows, 16, scenario.launch_s, 4.0, scenario.behaviour.controller_s
    )
    assert ended == pytest.approx({f"j{n}": at for n, at in enumerate(expected, start=1)})


def test_nothing_is_kept_of_a_job_that_has_ended() -> None:
    busy = (TraceSegment(function="update", offset_s=20.0, duration_s=10.0),)
    count = 60
    rows = tuple(
        TraceJob(
            job_id=f"job{index}",
            submit_s=200.0 * index,
            gpus=8,
            cycles=3,
            state_bytes=8 << 30,
            period_s=30.0,
            segments=busy,
        )
        for index in range(count)
    )
    # What earlier tests left is not looked through again and again.
    gc.collect()
    gc.freeze()
    try:
        run = TraceRun(Scenario(source=Jobs(rows), pools=(Pool(nodes=2),)))
        run.start()
        living = 0
        while run.shell.run(100) == 100:
            gc.collect()
            # Not isinstance: some living objects, of torch's for one, do not bear being asked.
            runs = [each for each in gc.get_objects() if type(each) is JobRun]
            living = max(living, len(runs))
    finally:
        gc.unfreeze()
    assert run.jobs_done == count
    assert living <= 4


def test_the_scheduler_remembers_no_more_of_a_long_trace_than_of_a_short_one() -> None:
    sizes = []
    for count in (200, 800):
        demand = MODEL_CLASSES["7B"].demand()
        rows = tuple(
            TraceJob(
                job_id=f"a{index}",
                submit_s=80.0 * index,
                gpus=8,
                tenant=f"t{index % 5}",
                cycles=2,
                **demand,
            )
            for index in range(count)
        )
        pools = (Pool(nodes=8),)
        run = TraceRun(Scenario(source=Jobs(rows), pools=pools, policy="spread+backfill"))
        run.start()
        while run.shell.run(1000) == 1000:
            pass
        assert run.jobs_done == count
        # Incarnations of forgotten deployments are kept of more than these.
        body = msgspec.msgpack.decode(run.shell.core.dump())
        del body["state"]["retired"], body["timers"]
        sizes.append(len(msgspec.msgpack.encode(body)))
    short, long = sizes
    assert long < 1.05 * short
