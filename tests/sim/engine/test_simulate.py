"""Whole runs of small traces lose nothing and are deterministic."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.ids import JobId
from plexrl.sim.engine.simulate import RunProgress, simulate
from plexrl.sim.engine.trace_run import TraceRun
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.policies import SIM_POLICIES
from plexrl.sim.workload.scenario import Behaviour, Pool, Scenario
from plexrl.traces import TraceJob
from plexrl.traces.generate.published import MODEL_CLASSES


@dataclass(frozen=True, slots=True)
class Jobs:
    """A source of jobs in memory."""

    rows: tuple[TraceJob, ...]

    def jobs(self) -> Iterator[TraceJob]:
        return iter(self.rows)


def rows(count: int, *, cycles: int = 8, gpus: int = 8, staleness: int = 0) -> tuple[TraceJob, ...]:
    demand = MODEL_CLASSES["7B"].demand()
    return tuple(
        TraceJob(
            job_id=f"job{index}",
            submit_s=40.0 * index,
            gpus=gpus,
            tenant=f"tenant{index % 2}",
            cycles=cycles,
            staleness=staleness,
            **demand,
        )
        for index in range(count)
    )


def scenario(jobs: tuple[TraceJob, ...], *, nodes: int = 2, policy: str = "pack") -> Scenario:
    return Scenario(source=Jobs(jobs), pools=(Pool(nodes=nodes),), policy=policy, switch_s=8.0)


def plain(result: SimResult) -> str:
    """The deterministic part of a result."""
    return repr(
        replace(result, speed=replace(result.speed, wall_s=0, events_per_s=0, peak_bytes=0))
    )


@pytest.mark.parametrize("policy", sorted(SIM_POLICIES))
def test_every_policy_drains(policy: str) -> None:
    result = simulate(scenario(rows(5), policy=policy))
    assert (result.jobs, result.failed_jobs, result.cycles) == (5, 0, 40)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("detail", ["burst", "operation"])
def test_a_job_alone_is_slowed_by_the_moves_of_its_state_only(staleness: int, detail: str) -> None:
    jobs = rows(1, cycles=150, staleness=staleness)
    alone = replace(scenario(jobs), detail=detail)  # type: ignore[arg-type]
    cycles: list[tuple[float, float]] = []
    result = simulate(alone, on_cycle=lambda _, *seconds: cycles.append(seconds))
    assert len(cycles) == result.cycles == 150
    assert [took_s for took_s, _ in cycles] == pytest.approx([alone_s for _, alone_s in cycles])
    unmoved = simulate(replace(alone, switch_s=0.0))
    assert unmoved.job_slowdown.highest == pytest.approx(0.0, abs=1e-9)
    assert unmoved.cycle_slowdown.highest == pytest.approx(0.0, abs=1e-9)


def test_the_same_scenario_gives_the_same_bytes() -> None:
    jobs = scenario(rows(6, cycles=6), policy="spread+backfill")
    assert plain(simulate(jobs)) == plain(simulate(jobs))
    assert plain(simulate(jobs)) != plain(simulate(replace(jobs, seed=1)))


def test_rollouts_that_run_ahead_are_never_slower() -> None:
    drains = [simulate(scenario(rows(1, cycles=20, staleness=s))).drain_s for s in (0, 1, 2)]
    assert drains == sorted(drains, reverse=True)
    assert drains[1] < 0.9 * drains[0]


def test_a_job_that_fits_nowhere_fails_and_the_others_go_on() -> None:
    large = replace(rows(1, gpus=64)[0], job_id="large")
    result = simulate(scenario((large, *rows(2))))
    assert (result.jobs, result.failed_jobs, result.cycles) == (3, 1, 16)


def test_both_details_agree_on_the_outcome() -> None:
    jobs = scenario(rows(4), policy="pack")
    still = replace(jobs, behaviour=Behaviour(jitter=0.0, controller_s=0.0))
    burst, operation = simulate(still), simulate(replace(still, detail="operation"))
    assert burst.drain_s == pytest.approx(operation.drain_s, rel=0.01)
    assert burst.events < operation.events


def test_progress_is_told_and_changes_nothing() -> None:
    seen: list[RunProgress] = []
    jobs = scenario(rows(3))
    assert plain(simulate(jobs, seen.append)) == plain(simulate(jobs))
    assert (seen[-1].jobs_done, seen[-1].jobs_seen) == (3, 3)


def test_jobs_that_declare_nothing_are_profiled_and_end() -> None:
    result = simulate(replace(scenario(rows(4, cycles=12), policy="spread"), warm=False))
    assert (result.jobs, result.cycles) == (4, 48)


@pytest.mark.parametrize("detail", ["burst", "operation"])
@pytest.mark.parametrize("policy", ["isolated", "pack"])
def test_the_scheduler_measures_the_cycles_that_are_run(policy: str, detail: str) -> None:
    """Alone and beside another, whose waiting is taken out."""
    jobs = replace(
        scenario(rows(2, cycles=12), policy=policy),
        behaviour=Behaviour(jitter=0.0),
        warm=False,
        detail=detail,  # type: ignore[arg-type]
    )
    run = TraceRun(jobs)
    run.start()
    known = MODEL_CLASSES["7B"]
    while run.shell.now < 10 * known.period_s:
        run.shell.run(1)
    for job in ("j1", "j2"):
        (told,) = run.shell.core.explain_job(JobId(job), run.shell.now)["deployments"]
        profile = told["profile"]
        assert profile is not None
        assert profile["period_s"] == pytest.approx(known.period_s, rel=0.01)
        busy_s = sum(each["duration_s"] for each in profile["segments"])
        assert busy_s == pytest.approx(known.busy_s, rel=0.01)


def test_jobs_of_many_nodes_share_a_group_though_no_switch_was_ever_seen() -> None:
    """Each node moves its own part of the state, and off the GPUs as fast as onto them."""
    demand = MODEL_CLASSES["235B"].demand()
    jobs = tuple(
        TraceJob(job_id=f"job{index}", submit_s=3000.0 * index, gpus=64, cycles=20, **demand)
        for index in range(2)
    )
    whole = Scenario(source=Jobs(jobs), pools=(Pool(nodes=8),), policy="spread+backfill")
    result = simulate(whole)
    assert result.cycles == 40
    assert result.wait.highest == 0.0


def test_the_simulator_loads_neither_the_state_manager_s_ways_nor_what_draws() -> None:
    unwanted = {"plexrl.statemanager.client.client", "matplotlib", "pyarrow", "ray", "torch"}
    code = f"import sys, plexrl.sim; print(sorted({unwanted!r} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_a_run_does_not_change_a_priority_that_the_scheduler_refuses() -> None:
    (job,) = rows(1)
    run = TraceRun(scenario((replace(job, priority=100),)))
    run.start()
    run.shell.run(2)
    assert run.shell.core.job_view(JobId("j1"), run.shell.now)["priority"] == 100
    with pytest.raises(InvalidRequestError, match=r"job0 \(at 101\) .* outside -100 to 100"):
        simulate(scenario((replace(job, priority=101),)))
