"""Writes the report of `plexrl simulate`, with a description of the scenario."""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from plexrl.cli.simulate.tables import (
    HEADLINES_MAX,
    Changed,
    Run,
    difference,
    headline_texts,
    money,
    nodes_of,
    setting,
    span,
    varying,
)
from plexrl.cli.terminal.context import warn
from plexrl.sim.report.bills import Billed, price_lines
from plexrl.sim.report.units import percent
from plexrl.sim.search.capacity_search import CapacityPlan
from plexrl.sim.workload.scenario import Scenario
from plexrl.sim.workload.source.survey import Survey
from plexrl.sim.workload.source.trace_source import PublishedSource, TraceSource
from plexrl.traces import Shape

NEEDS = ("jinja2", "matplotlib")
"""Packages of the extra `simulator` that the report needs."""


def report(
    trace: str,
    survey: Survey,
    runs: Sequence[Run],
    plans: Sequence[CapacityPlan],
    changes: Sequence[Changed],
    folder: Path,
) -> Path | None:
    """Write `report.html` into `folder`, or warn if its packages are not installed."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        warn(
            f"plexrl: no report.html, as {' and '.join(missing)} cannot be found: "
            "pip install 'plexrl[simulator]'"
        )
        return None
    from plexrl.sim.report import write_report

    scenarios = [scenario for scenario, _ in runs]
    sizes = {pool.node_type.gpus for scenario in scenarios for pool in scenario.pools}
    return write_report(
        [result for _, result in runs],
        folder,
        title=f"{trace}, simulated",
        scenario_lines=[
            *scenario_lines(trace, survey, scenarios),
            *(change_line(runs[change.of], change) for change in changes),
        ],
        labels=labels(scenarios),
        plans=plans,
        headline=headline_texts(runs)[:HEADLINES_MAX],
        billed=billed(runs),
        gpus_per_node=sizes.pop() if len(sizes) == 1 else None,
        window_s=scenarios[0].window_s,
    )


def labels(scenarios: Sequence[Scenario]) -> list[str]:
    """The label of each run: policy and differing settings; the report shows sizes itself."""
    names = varying(scenarios)
    types = {nodes_of(scenario) for scenario in scenarios if len(scenario.pools) > 1}
    found = []
    for scenario in scenarios:
        parts = [f"{name} {setting(scenario, name)}" for name in names]
        if len(types) > 1:
            parts.append(nodes_of(scenario))
        found.append(", ".join((scenario.policy, *parts)))
    return found


def billed(runs: Sequence[Run]) -> list[Billed]:
    """The runs with labels and prices."""
    named = zip(labels([scenario for scenario, _ in runs]), runs, strict=True)
    return [
        Billed(label=label, scenario=scenario, result=result) for label, (scenario, result) in named
    ]


def change_line(run: Run, change: Changed) -> tuple[str, str]:
    """(name, value) of a what-if: its figures, and the change relative to `run`."""
    (scenario, was), now = run, change.result
    drain = difference(was.drain_s, now.drain_s, span(now.drain_s))
    cost = difference(was.cost, now.cost, money(now.cost))
    return (
        f"what if {change.what}, {scenario.policy} on {nodes_of(scenario)}",
        f"drains in {span(now.drain_s)} ({drain}), costs {money(now.cost)} ({cost})",
    )


def scenario_lines(
    trace: str, survey: Survey, scenarios: Sequence[Scenario]
) -> list[tuple[str, str]]:
    """(name, value) of the runs' common settings."""
    first = scenarios[0]
    lines = [
        ("trace", ", ".join((trace, *_shaping(first)))),
        (
            "jobs",
            f"{survey.jobs:,} over {span(survey.arrivals_s)}, of up to {survey.gpus_max} GPUs",
        ),
        (
            "cluster",
            _same(f"{nodes_of(scenario)} nodes ({_types(scenario)})" for scenario in scenarios),
        ),
        (
            "rollouts",
            "on the cluster's GPUs" if first.places_rollouts else "outside of the cluster",
        ),
        *price_lines(first),
        ("jitter of cycles", _same(_jitter(scenario) for scenario in scenarios)),
        ("context switch", _same(_switch(scenario) for scenario in scenarios)),
        ("failures", _failures(first)),
        ("jobs' demand", "declared" if first.warm else "profiled by the scheduler"),
        ("seed", _same(str(scenario.seed) for scenario in scenarios)),
    ]
    behaviour = first.behaviour
    if behaviour.responses:
        lines.append(("responses", f"{behaviour.responses} responses, lengths {behaviour.lengths}"))
    if behaviour.stalls is not None:
        stalls = behaviour.stalls
        lines.append(("tool stalls", f"{percent(stalls.chance)} of cycles, {span(stalls.mean_s)}"))
    if behaviour.staleness is not None:
        lines.append(
            ("staleness", _same(str(scenario.behaviour.staleness) for scenario in scenarios))
        )
    return lines


def _shaping(scenario: Scenario) -> list[str]:
    source = scenario.source
    if not isinstance(source, TraceSource | PublishedSource):
        return []
    shape, plain = source.shape, Shape(gpus_min=1)
    parts = [
        (shape.compress != plain.compress, f"arrivals {shape.compress:g} times as fast"),
        (shape.backlog, "all jobs at the start"),
        (shape.gpus_min > plain.gpus_min, f"jobs of at least {shape.gpus_min} GPUs"),
        (shape.duration_s_min > 0, f"jobs of at least {span(shape.duration_s_min)}"),
    ]
    if shape.start_s:
        parts.append((True, f"from {span(shape.start_s)} on"))
    if shape.cap_s is not None:
        parts.append((True, f"durations capped at {span(shape.cap_s)}"))
    if source.gpus_max is not None:
        parts.append((True, f"jobs of at most {source.gpus_max} GPUs"))
    if source.span_s is not None:
        parts.append((True, f"the first {span(source.span_s)}"))
    return [text for holds, text in parts if holds]


def _types(scenario: Scenario) -> str:
    kinds = [f"{pool.node_type.name}, {pool.node_type.gpus} GPUs" for pool in scenario.pools]
    prices = scenario.prices
    if (prices.reserved, prices.on_demand, prices.rollout) == (None, None, None):
        kinds = [
            f"{kind} at {pool.node_type.price:g} an hour"
            for kind, pool in zip(kinds, scenario.pools, strict=True)
        ]
    return ", ".join(kinds)


def _jitter(scenario: Scenario) -> str:
    jitter = scenario.behaviour.jitter
    return "from the trace" if jitter is None else percent(jitter)


def _switch(scenario: Scenario) -> str:
    return "by state and rates" if scenario.switch_s is None else span(scenario.switch_s)


def _failures(scenario: Scenario) -> str:
    failures = scenario.failures
    parts = []
    if failures.node_mtbf_s:
        parts.append(
            f"a node every {span(failures.node_mtbf_s)}, back after {span(failures.repair_s)}"
        )
    if failures.worker_mtbf_s:
        parts.append(f"a job's workers every {span(failures.worker_mtbf_s)}")
    return "; ".join(parts) or "none"


def _same(values: Iterable[str]) -> str:
    """The common value, or the first and the last."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} … {distinct[-1]}"
