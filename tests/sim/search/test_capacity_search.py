"""The smallest cluster found matches a run of every size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from plexrl.sim.report.capacity import (
    certainty,
    cheapest_feasible,
    headline,
    meets_all,
    probe_table,
)
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.axes import with_nodes
from plexrl.sim.search.capacity_search import CapacityPlan, smallest_cluster
from plexrl.sim.search.cluster_size_search import Search
from plexrl.sim.search.objectives import objectives
from plexrl.sim.search.one_run import Outcome
from plexrl.sim.search.sweep import run_all
from plexrl.sim.workload.scenario import Pool, Scenario
from plexrl.traces import TraceJob, TraceSegment

LARGEST = 10
"""Nodes; a node to each job is more than enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedJobs:
    """Of one and two nodes, in two crowds, so that they wait where nodes are few."""

    def jobs(self) -> Iterator[TraceJob]:
        """All jobs in order of submission."""
        for index in range(8):
            yield TraceJob(
                job_id=f"job-{index}",
                tenant=f"tenant{index % 3}",
                submit_s=600.0 * (index // 4) + 10.0 * index,
                gpus=16 if index % 4 == 0 else 8,
                rollout_gpus=4,
                cycles=4 + 3 * (index % 3),
                period_s=100.0,
                jitter_s=15.0,
                state_bytes=1 << 34,
                segments=(TraceSegment(function="update", offset_s=60.0, duration_s=40.0),),
            )


BASE = Scenario(source=MixedJobs(), pools=(Pool(nodes=2),), switch_s=4.0)


@cache
def ran(scenario: Scenario) -> Outcome:
    (outcome,) = run_all([scenario], workers=1)
    return outcome


def run(scenarios: Sequence[Scenario]) -> tuple[Outcome, ...]:
    return tuple(ran(scenario) for scenario in scenarios)


def planned(policy: str, *wanted: str, at_once: int = 1, neighbours: int = 3) -> CapacityPlan:
    return smallest_cluster(
        replace(BASE, policy=policy),
        objectives(list(wanted)),
        lowest=2,
        highest=LARGEST,
        run=run,
        at_once=at_once,
        neighbours=neighbours,
    )


@pytest.mark.parametrize("policy", ["isolated", "pack", "spread", "spread+backfill"])
@pytest.mark.parametrize(
    "wanted",
    [
        ("wait.max<=1s",),
        ("wait.p95<=5min",),
        ("wait.mean<=2min", "cycle_slowdown.mean<=20%"),
        ("job_slowdown.median<=2%",),
        ("drain<=30min", "wait.p95<=10min"),
        ("drain<=1755s",),
        ("cycle_slowdown.mean<=5.8%",),
    ],
)
def test_the_answer_is_that_of_running_every_size(policy: str, wanted: tuple[str, ...]) -> None:
    every: dict[int, SimResult] = {}
    for size in range(2, LARGEST + 1):
        outcome = ran(with_nodes(replace(BASE, policy=policy), size))
        assert isinstance(outcome, SimResult)
        every[size] = outcome
    asked = objectives(list(wanted))
    meeting = [size for size in every if all(each.is_met(every[size]) for each in asked)]
    for at_once in (1, 4):
        plan = planned(policy, *wanted, at_once=at_once)
        if plan.nodes is None:
            assert not set(meeting) & set(plan.search.probes)
            continue
        assert plan.nodes in meeting
        missed = [size for size in meeting if size < plan.nodes]
        failing_from = plan.search.failing_from or plan.nodes
        assert all(size < failing_from for size in missed), "it said that these sizes fail"
        assert failing_from <= max(2, plan.nodes - 3)
        helps = meeting == list(range(meeting[0], LARGEST + 1))
        if helps:
            assert plan.nodes == meeting[0]
            assert plan.search.is_monotone
        seen = [size for size in plan.search.probes if size > plan.nodes]
        assert plan.search.is_monotone == all(size in meeting for size in seen)
    # With as many neighbours as there are sizes the scan is complete, whatever more nodes do.
    assert planned(policy, *wanted, neighbours=LARGEST).nodes == min(meeting, default=None)


def test_an_answer_above_which_a_size_fails_comes_with_a_warning() -> None:
    plan = planned("spread+backfill", "cycle_slowdown.mean<=5.8%")
    assert plan.nodes == 3
    assert not plan.search.is_monotone
    assert "Beware: 4 nodes fail though they are more" in certainty(plan)


def test_the_headline_says_nodes_cost_and_how_that_compares_with_isolated() -> None:
    plans = [planned(policy, "wait.max<=1s") for policy in ("isolated", "pack")]
    alone, shared = plans
    assert alone.nodes is not None
    assert shared.nodes is not None
    assert shared.nodes < alone.nodes
    text = headline(plans)
    assert text.startswith(f"To keep wait.max<=1s, pack needs {shared.nodes} nodes (")
    assert f"isolated {alone.nodes} at " in text
    fewer = 100 * (1 - shared.nodes / alone.nodes)
    assert f": {fewer:.1f} % fewer nodes than isolated, at " in text
    assert "fewer nodes" not in headline(plans[1:]), "nothing to compare with"
    assert "failed_jobs" not in text, "nobody asked for it and it holds"


def test_a_policy_without_an_answer_is_named_in_the_headline() -> None:
    good = planned("pack", "wait.max<=1s")
    bad = replace(good, policy="isolated", search=replace(good.search, nodes=None))
    sizes = f"no size that was run, up to {max(good.search.probes)} nodes,"
    assert headline([bad]) == f"With isolated {sizes} keeps wait.max<=1s."
    assert headline([bad, good]).endswith(f"; with isolated {sizes} does.")
    two = replace(bad, policy="spread")
    assert headline([bad, two]).startswith(f"With isolated or spread {sizes}")
    three = planned("pack", "wait.max<=1s,drain<=9d", "cost<=9k")
    assert headline([three]).startswith("To keep wait.max<=1s, drain<=9d and cost<=9k, pack needs")


def test_all_probes_stand_in_the_table_and_misses_are_marked() -> None:
    plan = planned("isolated", "wait.max<=1s", "cost<=1")
    table = probe_table([plan])
    assert table.columns == ("policy", "nodes", "GPUs", "keeps all", "cost", *table.columns[5:])
    assert table.columns[5:] == ("wait.max<=1s", "cost<=1")
    assert [int(row[1]) for row in table.rows] == list(plan.search.probes)
    assert {row[3] for row in table.rows} == {"no"}, "none keeps the cost"
    assert all(row[6].endswith("(!)") for row in table.rows)
    kept = planned("isolated", "wait.max<=1s")
    marks = {int(row[1]): row[3] for row in probe_table([kept]).rows}
    assert [size for size, mark in marks.items() if mark == "fewest"] == [kept.nodes]
    assert all(meets_all(kept, size) == (mark != "no") for size, mark in marks.items())


def test_what_is_known_of_larger_sizes_and_cheaper_ones_is_said() -> None:
    plan = planned("isolated", "wait.max<=1s")
    assert plan.nodes is not None
    results = {
        size: replace(result, cost=1.0 if size == max(plan.results) else 2.0)
        for size, result in plan.results.items()
    }
    cheaper = replace(plan, results=results)
    assert cheapest_feasible(cheaper) == max(plan.results) > plan.nodes
    assert f"meet all, {max(plan.results)} nodes cost least: 1" in certainty(cheaper)
    assert "cost least" not in certainty(replace(plan, results={plan.nodes: results[plan.nodes]}))
    odd = Search(nodes=2, probes={2: True, 4: False}, failing_from=None)
    text = certainty(replace(plan, search=odd))
    assert "2 nodes; it is the least that holds the largest job" in text
    assert "Beware: 4 nodes fail though they are more" in text
