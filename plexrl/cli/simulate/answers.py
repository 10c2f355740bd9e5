"""Runs the simulations of `plexrl simulate` and collects the answers."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plexrl.cli.simulate.job_rows import write_rows
from plexrl.cli.simulate.options.setup import Questions
from plexrl.cli.simulate.progress import RunsProgress
from plexrl.cli.simulate.tables import (
    Changed,
    Run,
    print_survey,
)
from plexrl.cli.terminal.context import warn
from plexrl.errors import InvalidRequestError
from plexrl.sim.results.bill import check_reserved
from plexrl.sim.search.axes import scenarios_along
from plexrl.sim.search.capacity_search import CapacityPlan, smallest_cluster
from plexrl.sim.search.one_run import FailedRun
from plexrl.sim.search.what_if import apply_change, reprice
from plexrl.sim.workload.response_lengths import read_longest_of
from plexrl.sim.workload.scenario import NODES_MAX, Scenario
from plexrl.sim.workload.source.job_copy import JobCopy, copy_jobs
from plexrl.sim.workload.source.survey import Survey, check_fits, survey_jobs
from plexrl.sim.workload.source.trace_source import PublishedSource, TraceSource
from plexrl.traces import Problem, Problems, TraceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All answers."""

    trace: str
    survey: Survey
    runs: tuple[Run, ...]
    plans: tuple[CapacityPlan, ...] = ()
    changes: tuple[Changed, ...] = ()
    failed: tuple[FailedRun, ...] = ()


def find_answers(
    trace: str,
    base: Scenario,
    asked: Questions,
    *,
    max_nodes: int,
    workers: int | None,
    ray_address: str | None,
    quiet: bool,
    jobs_out: Path | None = None,
) -> Answers:
    """Check the trace, execute the runs, and collect the answers; `jobs_out`: file for one row per
    job of each answer.

    Raises:
        TraceError: rows are bad and not skipped.
        CapacityError: jobs are larger than the cluster.
        InvalidRequestError: a question is invalid; raised before any run.
    """
    with TemporaryDirectory(prefix="plexrl-jobs-") as folder:
        copy = Path(folder) / "jobs"
        base, survey = _check_trace(trace, base, copy)
        scenarios = () if asked.objectives else _check_scenarios(base, asked, survey)
        if survey.without_rollout_gpus:
            warn(
                f"plexrl: {survey.without_rollout_gpus:,} of {survey.jobs:,} jobs have rollouts "
                "and no rollout GPUs, so cost and GPU-hours exclude those rollouts: add a column "
                "rollout_gpus to the trace"
            )
        if not quiet:
            print_survey(trace, survey)
        copies = {base.source: JobCopy(path=str(copy))}
        with RunsProgress(
            jobs=survey.jobs,
            workers=workers,
            ray_address=ray_address,
            copies=copies,
            quiet=quiet,
            rows_in=None if jobs_out is None else Path(folder),
        ) as run:
            plans: tuple[CapacityPlan, ...] = ()
            failed: tuple[FailedRun, ...] = ()
            if asked.objectives:
                at_once = workers or len(os.sched_getaffinity(0))
                plans = _plans(base, asked, survey, run, max_nodes=max_nodes, at_once=at_once)
                runs = tuple(_choose_run(base, plan) for plan in plans)
            else:
                runs, failed = _run_scenarios(scenarios, run)
            changes, more = _changes(runs, asked, run)
        if jobs_out is not None:
            write_rows(jobs_out, runs, run.job_rows)
    return Answers(
        trace=trace,
        survey=survey,
        runs=runs,
        plans=plans,
        changes=changes,
        failed=(*failed, *more),
    )


def _check_trace(trace: str, base: Scenario, copy: Path) -> tuple[Scenario, Survey]:
    """The scenario for the runs and the survey of its jobs, which are copied at the same time."""
    source = base.source
    assert isinstance(source, TraceSource | PublishedSource)
    skips = isinstance(source, TraceSource) and source.skip_bad
    problems = Problems(_printer(trace) if skips else None)
    if isinstance(source, TraceSource):
        # A single pass: faults are known at its end, before any run.
        source = replace(source, skip_bad=True)
    jobs = source.read(problems)
    survey = survey_jobs(
        copy_jobs(jobs if skips else _all_good(jobs, problems, trace), copy),
        places_rollouts=base.places_rollouts,
    )
    base = replace(base, source=source)
    if base.behaviour.responses:
        read_longest_of(base.behaviour.responses, base.behaviour.lengths)
    return base, survey


def _all_good(jobs: Iterator[TraceJob], problems: Problems, trace: str) -> Iterator[TraceJob]:
    yield from jobs
    if problems.count:
        raise problems.error(trace)


def _check_scenarios(base: Scenario, asked: Questions, survey: Survey) -> tuple[Scenario, ...]:
    """The requested scenarios, after checking that all can run."""
    scenarios = tuple(scenarios_along(base, asked.axes))
    others = [apply_change(scenario, what) for scenario in scenarios for what in asked.changes]
    for scenario in (*scenarios, *others):
        check_fits(survey, scenario.pools)
    check_reserved((*scenarios, *others), max(_nodes(each) for each in (*scenarios, *others)))
    return scenarios


def _nodes(scenario: Scenario) -> int:
    return sum(pool.nodes for pool in scenario.pools)


def _plans(
    base: Scenario,
    asked: Questions,
    survey: Survey,
    run: RunsProgress,
    *,
    max_nodes: int,
    at_once: int,
) -> tuple[CapacityPlan, ...]:
    lowest, highest = _sizes(survey, base, max_nodes)
    check_reserved((base, *(apply_change(base, what) for what in asked.changes)), max_nodes)
    return tuple(
        smallest_cluster(
            replace(base, policy=policy),
            asked.objectives,
            lowest=lowest,
            highest=highest,
            run=run,
            at_once=at_once,
        )
        for policy in asked.policies
    )


def _run_scenarios(
    scenarios: Sequence[Scenario], run: RunsProgress
) -> tuple[tuple[Run, ...], tuple[FailedRun, ...]]:
    done: list[Run] = []
    failed: list[FailedRun] = []
    for scenario, outcome in zip(scenarios, run(scenarios), strict=True):
        if isinstance(outcome, FailedRun):
            failed.append(outcome)
        else:
            done.append((scenario, outcome))
    return tuple(done), tuple(failed)


def _changes(
    runs: Sequence[Run], asked: Questions, run: RunsProgress
) -> tuple[tuple[Changed, ...], tuple[FailedRun, ...]]:
    wanted = [
        (what, of, apply_change(scenario, what))
        for what in asked.changes
        for of, (scenario, _) in enumerate(runs)
    ]
    priced = [reprice(*runs[of], other) for _, of, other in wanted]
    ran = iter(
        run([other for (_, _, other), result in zip(wanted, priced, strict=True) if result is None])
        if None in priced
        else ()
    )
    found: list[Changed] = []
    failed: list[FailedRun] = []
    for (what, of, other), known in zip(wanted, priced, strict=True):
        result = known if known is not None else next(ran)
        if isinstance(result, FailedRun):
            failed.append(result)
            continue
        found.append(
            Changed(what=what.text, of=of, scenario=other, result=result, ran=known is None)
        )
    return tuple(found), tuple(failed)


def _sizes(survey: Survey, base: Scenario, max_nodes: int) -> tuple[int, int]:
    lowest, highest = survey.nodes_for(base.pools[0].node_type.gpus)
    if max_nodes < lowest:
        mend = (
            "raise it"
            if lowest <= NODES_MAX
            else f"a pool has at most {NODES_MAX}, so use nodes of more GPUs (--gpus-per-node)"
        )
        raise InvalidRequestError(
            f"the largest job needs {lowest} nodes, and --max-nodes is {max_nodes}: {mend}, or "
            "exclude large jobs by --max-gpus"
        )
    pool = replace(base.pools[0], nodes=lowest)
    check_fits(survey, (pool, *base.pools[1:]))
    return lowest, min(highest, max_nodes, NODES_MAX)


def _choose_run(base: Scenario, plan: CapacityPlan) -> Run:
    size = plan.search.nodes
    if size is None:
        size = max(plan.results)
    pool = replace(base.pools[0], nodes=size)
    return replace(base, policy=plan.policy, pools=(pool,)), plan.results[size]


def _printer(trace: str) -> Any:
    def report(problem: Problem) -> None:
        field = f"{problem.field} " if problem.field else ""
        warn(f"{trace}:{problem.line}: {field}{problem.message}")

    return report
