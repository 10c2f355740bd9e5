"""The tables of `plexrl simulate` for people."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from plexrl.cli.context import print_line, print_table
from plexrl.sim.capacity_search import CapacityPlan
from plexrl.sim.objectives import Objective, utilisation
from plexrl.sim.report.comparison import BASELINE, recovered
from plexrl.sim.result import SimResult
from plexrl.sim.scenario import Scenario
from plexrl.sim.survey import Survey

Run = tuple[Scenario, SimResult]


def print_survey(trace: str, survey: Survey) -> None:
    """What the trace asks for."""
    print_line(
        f"{trace}: {survey.jobs:,} jobs over {span(survey.arrivals_s)}, up to {survey.gpus_max} "
        f"GPUs each; they hold {hours(survey.held_gpu_s / 3600)} training GPU-hours alone, and "
        f"need {percent(_part(survey.busy_gpu_s, survey.held_gpu_s))} of them."
    )


def print_runs(runs: Sequence[Run]) -> None:
    """A row a run."""
    varies = varying([scenario for scenario, _ in runs])
    isolated = isolated_runs(runs)
    columns = ("policy", "nodes", *varies, "drain", "bound", "gap recovered")
    columns += ("wait p50", "wait p95", "slowdown p50", "p95", "training", "GPU-h/cycle")
    columns += ("switches", "failed", "cost")
    rows = []
    for scenario, result in runs:
        gap = gap_recovered(scenario, result, isolated)
        rows.append(
            (
                scenario.policy,
                nodes_of(scenario),
                *(setting(scenario, name) for name in varies),
                span(result.drain_s),
                span(result.bounds.bound_s),
                "" if gap is None else percent(gap),
                span(result.wait.median),
                span(result.wait.p95),
                percent(result.job_slowdown.median),
                percent(result.job_slowdown.p95),
                percent(utilisation(result)),
                f"{result.gpu_hours_per_cycle:,.2f}",
                f"{result.switches:,}",
                f"{result.failed_jobs:,}",
                money(result.cost),
            )
        )
    shown = _without_empty(columns, rows)
    print_table(f"{runs[0][1].jobs + runs[0][1].failed_jobs:,} jobs", *shown)


def print_plans(plans: Sequence[CapacityPlan]) -> None:
    """The smallest cluster of each policy, the figures of its objectives, and how sure that is."""
    objectives = plans[0].objectives
    rows = []
    for plan in plans:
        size = plan.search.nodes
        result = plan.results[size if size is not None else max(plan.results)]
        rows.append(
            (
                plan.policy,
                "none" if plan.nodes is None else f"{plan.nodes:,}",
                *(shown(each, each.value(result)) for each in objectives),
                money(result.cost),
            )
        )
    columns = ("policy", "nodes", *(each.text for each in objectives), "cost")
    print_table("Smallest cluster", columns, rows)
    for plan in plans:
        print_line(said(plan))


def print_changes(changes: Sequence[tuple[str, Run, Run, bool]]) -> None:
    """What-ifs: (what, the run as it stands, the run as changed, whether that was run)."""
    rows = []
    for text, (scenario, was), (_, now), ran in changes:
        rows.append(
            (
                text,
                scenario.policy,
                nodes_of(scenario),
                span(now.drain_s),
                difference(was.drain_s, now.drain_s),
                span(now.wait.p95),
                difference(was.wait.p95, now.wait.p95),
                percent(now.job_slowdown.median),
                money(now.cost),
                difference(was.cost, now.cost),
                "run" if ran else "priced anew",
            )
        )
    columns = ("what if", "policy", "nodes", "drain", "", "wait p95", "", "slowdown p50")
    print_table("What if", (*columns, "cost", "", "by"), rows)


def isolated_runs(runs: Sequence[Run]) -> dict[Scenario, SimResult]:
    """The isolated runs, by their scenarios."""
    return {_isolated(scenario): result for scenario, result in runs if scenario.policy == BASELINE}


def gap_recovered(
    scenario: Scenario, result: SimResult, isolated: Mapping[Scenario, SimResult]
) -> float | None:
    """Part of the time between the isolated run's drain and the bound that is saved; None where no
    isolated run is beside it, or leaves nothing to save."""
    alone = isolated.get(_isolated(scenario))
    if alone is None or scenario.policy == BASELINE:
        return None
    return recovered(result, alone)


def nodes_of(scenario: Scenario) -> str:
    """Of its pools."""
    if len(scenario.pools) == 1:
        return f"{scenario.pools[0].nodes:,}"
    return " + ".join(f"{pool.nodes:,} {pool.node_type.name}" for pool in scenario.pools)


def shown(objective: Objective, value: float) -> str:
    """A figure, and whether it keeps its bound."""
    if objective.unit == "time":
        text = span(value)
    elif objective.unit == "money":
        text = money(value)
    elif objective.unit == "part":
        text = percent(value) if objective.bound < 1 else f"{value:.2f}"
    else:
        text = f"{value:,.4g}"
    kept = value <= objective.bound if objective.at_most else value >= objective.bound
    return text if kept else f"{text} (!)"


def span(value_s: float) -> str:
    """A time in the unit that suits it."""
    for unit, length_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value_s >= 2 * length_s:
            return f"{value_s / length_s:,.1f} {unit}"
    return f"{value_s:.1f} s" if value_s else "0"


def percent(part: float) -> str:
    """A part of one."""
    return f"{100 * part:.1f} %"


def hours(value: float) -> str:
    """Whole ones."""
    return f"{value:,.0f}"


def money(value: float) -> str:
    """Whole units of whatever currency prices have."""
    return f"{value:,.0f}"


def difference(was: float, now: float) -> str:
    """By how much of what it was."""
    if was == now:
        return "="
    return f"{100 * (now - was) / was:+.1f} %" if was else ""


def said(plan: CapacityPlan) -> str:
    """The answer of a search, and how far it can be trusted."""
    search = plan.search
    tried = f"{len(search.probes)} sizes were run"
    if search.nodes is None:
        return (
            f"{plan.policy}: no cluster of up to {max(search.probes):,} nodes meets the "
            f"objectives; the table shows that size ({tried})."
        )
    below = "it is the least that holds the largest job"
    if search.failing_from is not None:
        below = f"all sizes from {search.failing_from:,} to {search.nodes - 1:,} fail"
    text = f"{plan.policy}: {search.nodes:,} nodes; {below} ({tried})."
    if not search.is_monotone:
        failing = [size for size, met in search.probes.items() if not met and size > search.nodes]
        text += (
            f" Beware: {', '.join(f'{size:,}' for size in failing)} nodes fail though they are "
            "more; more nodes do not always help this trace."
        )
    if plan.broken_budgets:
        text += (
            f" But at that size {', '.join(each.text for each in plan.broken_budgets)} does not "
            "hold; larger clusters were not looked at for that."
        )
    return text


def _part(of: float, whole: float) -> float:
    return of / whole if whole else 0.0


def _isolated(scenario: Scenario) -> Scenario:
    return replace(scenario, policy=BASELINE)


_SETTINGS = ("seed", "jitter", "staleness", "switch")


def setting(scenario: Scenario, name: str) -> str:
    """A setting that sweeps vary, as text; empty where the trace decides."""
    value = {
        "seed": scenario.seed,
        "jitter": scenario.behaviour.jitter,
        "staleness": scenario.behaviour.staleness,
        "switch": scenario.switch_s,
    }[name]
    return "" if value is None else f"{value:g}"


def varying(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """Names of the settings, but policy and size, in which scenarios differ."""
    return tuple(name for name in _SETTINGS if len({setting(each, name) for each in scenarios}) > 1)


def _without_empty(
    columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A column that says nothing in any row only takes room."""
    kept = [
        at
        for at, name in enumerate(columns)
        if any(row[at] and not (name == "failed" and row[at] == "0") for row in rows)
    ]
    return (
        tuple(columns[at] for at in kept),
        [tuple(row[at] for at in kept) for row in rows],
    )
