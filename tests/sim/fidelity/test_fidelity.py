"""Cycles are extracted from a live run's log, and predictions are compared with them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.state.messages import events as ev
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.sim.fidelity.errors import errors_of
from plexrl.sim.fidelity.fidelity import (
    RecordedCycles,
    RecordedMoves,
    compare,
    compare_drawn,
    compare_recorded,
    fit_linear,
    predict_recorded,
)
from plexrl.sim.fidelity.planning import named
from plexrl.sim.fidelity.recording import RecordedCycle, RecordedJob, overheads, recorded_run
from plexrl.sim.state.move_costs import MoveCosts
from plexrl.sim.workload.cycles import CycleDistribution
from plexrl.sim.workload.scenario import Behaviour, NodeType, Pool, Scenario
from plexrl.traces import TraceJob, TraceSegment
from plexrl.traces.convert.history import PastOperation, history_of
from plexrl.traces.convert.recorder import record
from plexrl.wire import messages as cmd
from tests.examples import examples

PACK = named("pack")

KINDS = ("forward", "forward_backward", "optim_step")


@dataclass(frozen=True)
class Some:
    """A source of jobs in memory."""

    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        return iter(self.rows)


def some_job(name: str, *, rollout_s: float = 2.0, jitter: float = 0.2, **fields: Any) -> TraceJob:
    """A job of half a second's work a cycle, after its rollout."""
    work = (("log_prob", 0.1), ("update", 0.3), ("sync", 0.1))
    segments, at_s = [], rollout_s
    for function, length_s in work:
        segments.append(TraceSegment(function=function, offset_s=at_s, duration_s=length_s))
        at_s += length_s + 0.02
    usual: dict[str, Any] = {"cycles": 20, "gpus": 1, "state_bytes": 1 << 20}
    usual |= {"submit_s": 0.0, "jitter_s": jitter * at_s, **fields}
    return TraceJob(job_id=name, period_s=at_s - 0.02, segments=tuple(segments), **usual)


class Log:
    """Writes what a simulated cluster does in rows as a live one's operation log has."""

    def __init__(self, run: TraceRun) -> None:
        self.rows: list[dict[str, Any]] = []
        self.submitted: dict[str, tuple[float, int]] = {}
        self.runs: dict[str, tuple[cmd.Run, float]] = {}
        run.shell.observe(self.observe)

    def observe(self, event: ev.Event, commands: Sequence[cmd.Command], now: float) -> None:
        if isinstance(event, ev.OperationSubmitted):
            self.submitted[event.operation] = now, event.tokens
        if isinstance(event, ev.OperationFinished):
            command, started_at = self.runs.pop(event.operation)
            submitted_at, tokens = self.submitted.pop(event.operation, (started_at, 0))
            self.rows.append(
                {
                    "deployment": command.deployment,
                    "kind": command.kind.value,
                    "state": "finished",
                    "group": "g1",
                    "submitted_at": submitted_at,
                    "started_at": started_at,
                    "finished_at": now,
                    "compute_s": event.compute_s,
                    "index": len(self.rows),
                    "tokens": tokens,
                }
            )
        for each in commands:
            if isinstance(each, cmd.Run):
                self.runs[each.operation] = each, now


def simulated(
    jobs: Sequence[TraceJob], *, seed: int = 0, policy: str = "pack"
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Job views and operation log of a simulated run of `jobs` on one GPU."""
    node = NodeType(gpus=1, move_fixed_s=0.01, host_bytes_per_s=1e9)
    scenario = Scenario(
        source=Some(tuple(jobs)),
        pools=(Pool(nodes=1, node_type=node),),
        policy=policy,
        seed=seed,
        behaviour=Behaviour(controller_s=0.005),
        detail="operation",
        warm=False,
        launch_s=0.0,
    )
    run = TraceRun(scenario)
    log = Log(run)
    run.start()
    while run.shell.run(1000):
        pass
    run.check_it_ended()
    views = [
        {
            "job": job.job_id,
            "name": job.job_id,
            "tenant": "",
            "priority": 0,
            "state": "COMPLETED",
            "submitted_at": job.submit_s,
            "ended_at": run.shell.now,
            "deployments": [
                {
                    "deployment": f"j{number}",
                    "kind": "train",
                    "workers": 1,
                    "state_bytes": job.state_bytes,
                }
            ],
        }
        for number, job in enumerate(jobs, 1)
    ]
    return views, log.rows


Rows = Sequence[Mapping[str, Any]]


def recorded_of(
    views: Rows, rows: Rows, beyond: Mapping[str, Mapping[str, float]]
) -> tuple[RecordedJob, ...]:
    history = history_of(views, rows, {"now": 1e9})
    return recorded_run(history.jobs, history.operations, beyond)


def past(rows: Rows) -> tuple[PastOperation, ...]:
    return history_of([], rows, {"now": 1e9}).operations


def none_added(jobs: Sequence[TraceJob]) -> Mapping[str, Mapping[str, float]]:
    return {job.job_id: dict.fromkeys(KINDS, 0.0) for job in jobs}


@pytest.mark.parametrize("policy", ["pack", "fifo-lock", "least-recently-served"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_recorded_simulation_predicts_itself(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A recording has a load's mean length only, so loads that overlap are predicted less exactly.
    monkeypatch.setattr(MoveCosts, "prefetched_part", RecordedMoves.prefetched_part)
    jobs = [
        some_job("a", rollout_s=1.0),
        some_job("b", rollout_s=1.3, submit_s=0.4, state_bytes=3 << 20, cycles=15),
        some_job("c", rollout_s=0.9, submit_s=0.7, state_bytes=9 << 20),
    ]
    views, rows = simulated(jobs, seed=seed, policy=policy)
    recorded = recorded_of(views, rows, none_added(jobs))
    assert [len(job.cycles) for job in recorded] == [20, 15, 20]
    found = compare_recorded(recorded, named(policy))
    assert max(cycle.error for cycle in found.cycles) < 1e-6
    assert found.errors.p95 < 1e-6
    assert found.alone_errors.mean > 0.05, "nobody has waited: this shows nothing"


def test_a_recorded_cycle_is_what_was_drawn() -> None:
    jobs = [some_job("a", rollout_s=1.0), some_job("b", rollout_s=1.1)]
    views, rows = simulated(jobs, seed=4)
    for job, known in zip(recorded_of(views, rows, none_added(jobs)), jobs, strict=True):
        source = CycleDistribution(known, Behaviour(), 4)
        for number, cycle in enumerate(job.cycles):
            drawn = source.draw(number)
            assert cycle.segments_s == pytest.approx(drawn.segments_s)
            assert cycle.gaps_s == pytest.approx(drawn.gaps_s)
            assert cycle.tokens == drawn.tokens
            controller_s = 0.005 if number else 0.0
            assert cycle.rollout_s == pytest.approx(drawn.rollout_s + controller_s)
            assert cycle.took_s >= cycle.alone_s - 1e-9


def test_a_wrong_input_is_an_error_of_its_size() -> None:
    jobs = [some_job("a")]
    views, rows = simulated(jobs)
    (recorded,) = recorded_of(views, rows, none_added(jobs))
    longer = replace(
        recorded,
        cycles=tuple(
            replace(cycle, segments_s=tuple(1.1 * each for each in cycle.segments_s))
            for cycle in recorded.cycles
        ),
    )
    found = compare_recorded([longer], PACK)
    for cycle, known in zip(found.cycles, recorded.cycles[3:], strict=True):
        assert cycle.measured_s == known.took_s
        assert cycle.error == pytest.approx(0.1 * sum(known.segments_s) / known.took_s)
    (job,) = found.jobs
    assert 0.0 < job.error < 0.1


def test_what_the_control_plane_adds_is_taken_from_a_run_alone() -> None:
    alone = [row("forward", 0.0, 0.0, 1.0, 0.9), row("forward", 2.0, 2.5, 3.0, 0.2)]
    alone += [row("forward", 3.0, 3.0, 4.0, 0.5), row("publish", 4.0, 4.0, 4.5, 0.5)]
    assert overheads(past(alone)) == pytest.approx({"forward": 0.3, "publish": 0.0})
    log = [row("forward", 1.0, 3.0, 4.0, 0.5), row("publish", 4.5, 4.5, 5.5, 0.75)]
    (job,) = recorded_of([view("a")], log, {"a": overheads(past(alone))})
    (cycle,) = job.cycles
    assert cycle.segments_s == pytest.approx((0.8, 0.75))
    assert (cycle.rollout_s, cycle.gaps_s, cycle.took_s) == (1.0, (0.5,), 5.5)
    assert cycle.alone_s == pytest.approx(1.0 + 0.8 + 0.5 + 0.75)


def test_what_was_never_run_alone_is_named() -> None:
    log = [row("forward", 1.0, 3.0, 4.0, 0.5), row("publish", 4.5, 4.5, 5.5, 0.75)]
    with pytest.raises(InvalidRequestError, match="overhead of publish"):
        recorded_of([view("a")], log, {"a": {"forward": 0.1}})


def test_a_log_without_a_whole_cycle_is_refused() -> None:
    log = [row("barrier", 0.0, 0.0, 0.1, 0.0)]
    with pytest.raises(InvalidRequestError, match="no whole cycle"):
        recorded_of([view("a")], log, {})


def test_unequal_cycles_are_refused() -> None:
    kinds = ("forward", "publish", "forward", "forward", "publish")
    log = [row(kind, index, index, index + 1, 1.0) for index, kind in enumerate(kinds)]
    with pytest.raises(InvalidRequestError, match="cycle 1 is forward, forward, publish"):
        recorded_of([view("a")], log, {"a": {"forward": 0.0, "publish": 0.0}})


def test_predictions_of_other_cycles_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="predictions are not of the measured cycles"):
        compare({"a": [1.0, 2.0]}, {"a": [1.0]}, {"a": [1.0, 2.0]}, warm_up=0)
    with pytest.raises(InvalidRequestError, match="warm-up"):
        compare({"a": [1.0]}, {"a": [1.0]}, {"a": [1.0]}, warm_up=1)


SECONDS = st.floats(0.0, 10.0)


@st.composite
def recorded_jobs(draw: st.DrawFn) -> RecordedJob:
    count = draw(st.integers(1, 5))
    gaps = st.tuples(*[st.sampled_from([0.0, 0.01, 0.5]) for _ in range(count - 1)])
    one = st.builds(
        RecordedCycle,
        took_s=st.floats(0.1, 50.0),
        rollout_s=SECONDS,
        segments_s=st.tuples(*[SECONDS for _ in range(count)]),
        held_s=st.tuples(*[SECONDS for _ in range(count)]),
        gaps_s=gaps,
        tokens=st.integers(0, 1000),
    )
    return RecordedJob(
        name="a",
        gpus=1,
        state_bytes=draw(st.integers(0, 1 << 40)),
        began_at=0.0,
        kinds=tuple(draw(st.lists(st.sampled_from(KINDS), min_size=count, max_size=count))),
        cycles=tuple(draw(st.lists(one, min_size=1, max_size=5))),
        load_s=draw(SECONDS),
        offload_s=draw(SECONDS),
        control_s=0.0,
    )


@given(recorded_jobs())
def test_a_replayed_cycle_keeps_its_seconds(job: RecordedJob) -> None:
    source = RecordedCycles(job)
    for number, cycle in enumerate(job.cycles):
        drawn = source.draw(number)
        assert len(source.functions) == len(drawn.segments_s) == len(drawn.gaps_s) + 1
        assert math.isclose(drawn.busy_s, math.fsum(cycle.segments_s), abs_tol=1e-9)
        whole_s = drawn.rollout_s + drawn.busy_s + math.fsum(drawn.gaps_s)
        assert math.isclose(whole_s, cycle.alone_s, abs_tol=1e-9)


@given(st.lists(st.tuples(st.floats(0.0, 1e12), SECONDS), min_size=1, max_size=5))
def test_move_costs_are_a_non_negative_line(points: list[tuple[float, float]]) -> None:
    line = fit_linear(points)
    assert line.fixed_s >= 0.0
    assert line.byte_s >= 0.0
    said_s = math.fsum(line.seconds(size) for size, _ in points)
    assert said_s == pytest.approx(math.fsum(took for _, took in points), rel=1e-6, abs=1e-6)


def test_a_linear_move_cost_is_recovered() -> None:
    line = fit_linear([(size, 0.5 + size / 4.0) for size in (1.0, 2.0, 7.0)])
    assert (line.fixed_s, line.byte_s) == pytest.approx((0.5, 0.25))


@settings(deadline=None, max_examples=examples(10))
@given(st.integers(0, 1 << 20))
def test_a_job_alone_is_predicted_from_drawn_cycles(seed: int) -> None:
    jobs = [some_job("a", jitter=0.0, cycles=12)]
    views, rows = simulated(jobs, seed=seed)
    recorded = recorded_of(views, rows, none_added(jobs))
    history = history_of(views, rows, {"now": 1e9})
    told = record(history.jobs, history.operations, now=history.now)
    (found,) = compare_drawn(told, recorded, PACK, seeds=(seed,), names={"a": "a"})
    assert found.error == pytest.approx(0.0, abs=1e-3)
    assert found.measured_s == pytest.approx(found.alone_s, rel=1e-3)


def test_sharers_are_predicted_from_drawn_cycles() -> None:
    jobs = [some_job(name, rollout_s=1.0, jitter=0.15, cycles=100) for name in "abc"]
    views, rows = simulated(jobs, seed=7)
    recorded = recorded_of(views, rows, none_added(jobs))
    history = history_of(views, rows, {"now": 1e9})
    told = record(history.jobs, history.operations, now=history.now)
    same = {name: name for name in "abc"}
    found = compare_drawn(told, recorded, PACK, seeds=(1, 2, 3), names=same)
    assert all(abs(job.error) < 0.1 for job in found), found
    assert all(job.measured_s > 1.05 * job.alone_s for job in found), "nobody has waited"


def test_jobs_of_different_sizes_share_no_group() -> None:
    jobs = [some_job("a"), some_job("b")]
    views, rows = simulated(jobs)
    one, two = recorded_of(views, rows, none_added(jobs))
    with pytest.raises(InvalidRequestError, match="shared one group"):
        predict_recorded([one, replace(two, gpus=2)], PACK)


def test_errors_are_those_of_a_known_set() -> None:
    found = errors_of([0.4, 0.1, 0.2, 0.3])
    assert (found.median, found.mean, found.p95) == pytest.approx((0.25, 0.25, 0.4))


def row(
    kind: str, submitted_at: float, started_at: float, finished_at: float, compute_s: float
) -> dict[str, Any]:
    """One row of an operation log."""
    return {
        "deployment": "a/actor",
        "kind": kind,
        "state": "finished",
        "group": "g1",
        "submitted_at": submitted_at,
        "started_at": started_at,
        "finished_at": finished_at,
        "compute_s": compute_s,
        "index": round(1000 * started_at),
        "tokens": 7,
    }


def view(name: str) -> dict[str, Any]:
    """One job's view."""
    deployments = [
        {"deployment": f"{name}/rollout", "kind": "rollout", "workers": 1, "state_bytes": 1},
        {"deployment": f"{name}/actor", "kind": "train", "workers": 1, "state_bytes": 1},
    ]
    return {
        "name": name,
        "job": name,
        "tenant": "t",
        "priority": 0,
        "state": "COMPLETED",
        "submitted_at": 0.0,
        "ended_at": 1.0,
        "deployments": deployments,
    }
