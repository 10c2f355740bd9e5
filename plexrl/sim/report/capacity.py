"""Describes the smallest clusters in text and a table: answer, certainty, probes. Pure."""

from collections.abc import Sequence

from plexrl.sim.report.tables import ReportTable
from plexrl.sim.report.units import duration, percent, short
from plexrl.sim.results.comparison import BACKFILLED, ISOLATED
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.capacity_search import CapacityPlan
from plexrl.sim.search.objectives import NO_FAILED_JOBS, Objective

MISSED = " (!)"
"""Suffix of a figure that misses its bound."""


def headline(plans: Sequence[CapacityPlan]) -> str:
    """The answer in one sentence: the fewest nodes of each policy, their cost, and the comparison
    with isolated groups."""
    wanted = _listed([objective.text for objective in shown_objectives(plans)], "and")
    found = sorted((plan for plan in plans if plan.nodes is not None), key=_by_need)
    lacking = [plan for plan in plans if plan.nodes is None]
    largest = max((max(plan.search.probes) for plan in lacking), default=0)
    none = f"no size that was run, up to {largest:,} nodes,"
    policies = _listed([plan.policy for plan in lacking], "or")
    if not found:
        return f"With {policies} {none} keeps {wanted}."
    first, *others = found
    needs = [f"{first.policy} needs {_count(first)} at a cost of {short(answer(first).cost)}"]
    needs += [f"{plan.policy} {plan.nodes:,} at {short(answer(plan).cost)}" for plan in others]
    text = f"To keep {wanted}, {', '.join(needs)}{_beside_baseline(first, found)}"
    return f"{text}; with {policies} {none} does." if lacking else f"{text}."


def certainty(plan: CapacityPlan) -> str:
    """The answer of a search and its certainty."""
    search = plan.search
    tried = f"{len(search.probes)} sizes were run"
    if search.nodes is None:
        return (
            f"{plan.policy}: no cluster of up to {max(search.probes):,} nodes meets the "
            f"objectives ({tried})."
        )
    below = "it is the least that holds the largest job"
    if search.failing_from is not None:
        below = f"all sizes from {search.failing_from:,} to {search.nodes - 1:,} fail"
    nodes = "1 node" if search.nodes == 1 else f"{search.nodes:,} nodes"
    text = f"{plan.policy}: {nodes}; {below} ({tried})."
    if not search.is_monotone:
        failing = [size for size, met in search.probes.items() if not met and size > search.nodes]
        text += (
            f" Beware: {', '.join(f'{size:,}' for size in failing)} nodes fail though they are "
            "more; more nodes do not always help this trace."
        )
    if plan.broken_budgets:
        broken = ", ".join(budget.text for budget in plan.broken_budgets)
        text += (
            f" But at that size {broken} does not hold; larger ones were not looked at for that."
        )
    cheapest = cheapest_feasible(plan)
    if cheapest is not None and cheapest != plan.nodes:
        cost = short(plan.results[cheapest].cost)
        text += f" Of the sizes that were run and meet all, {cheapest:,} nodes cost least: {cost}."
    return text


def answer(plan: CapacityPlan) -> SimResult:
    """The run on the smallest cluster found; if none was found, on the largest one tried."""
    size = plan.search.nodes
    return plan.results[max(plan.results) if size is None else size]


def meets_all(plan: CapacityPlan, size: int) -> bool:
    """Whether the run of this size meets every objective, budgets included."""
    return all(objective.is_met(plan.results[size]) for objective in plan.objectives)


def cheapest_feasible(plan: CapacityPlan) -> int | None:
    """The cheapest size that was run and meets every objective; the smallest if several are."""
    sizes = [size for size in plan.results if meets_all(plan, size)]
    return min(sizes, key=lambda size: (plan.results[size].cost, size), default=None)


def shown_objectives(plans: Sequence[CapacityPlan]) -> list[Objective]:
    """The plans' common objectives; `NO_FAILED_JOBS` only if it is the only one or is missed."""
    asked = plans[0].objectives
    broken = any(result.failed_jobs for plan in plans for result in plan.results.values())
    return [each for each in asked if each != NO_FAILED_JOBS or broken or len(asked) == 1]


def figure(objective: Objective, result: SimResult) -> str:
    """The figure of a run, with a mark if it misses its bound."""
    value = objective.value(result)
    if objective.unit == "time":
        text = duration(value)
    elif is_percentage(objective):
        text = percent(value)
    else:
        text = short(value)
    return text if objective.is_met(result) else text + MISSED


def is_percentage(objective: Objective) -> bool:
    """Whether the figure is shown in percent: fractions, not indices or multiples."""
    return objective.unit == "part" and objective.bound < 1 and objective.metric != "worst_tenant"


def probe_table(plans: Sequence[CapacityPlan]) -> ReportTable:
    """One row per run, by policy and size."""
    wanted = shown_objectives(plans)
    rows: list[tuple[str, ...]] = []
    breaks = set()
    for plan in plans:
        breaks.add(len(rows))
        for size, result in plan.results.items():
            met = "yes" if meets_all(plan, size) else "no"
            figures = (figure(each, result) for each in wanted)
            keeps = "fewest" if size == plan.nodes else met
            rows.append(
                (plan.policy, f"{size:,}", f"{result.gpus:,}", keeps, short(result.cost), *figures)
            )
    columns = ("policy", "nodes", "GPUs", "keeps all", "cost", *(each.text for each in wanted))
    return ReportTable(
        groups=(("", 1), ("cluster", 2), ("", 2), ("objectives", len(wanted))),
        columns=columns,
        rows=tuple(rows),
        breaks=frozenset(breaks - {0}),
    )


def _beside_baseline(first: CapacityPlan, found: Sequence[CapacityPlan]) -> str:
    by_policy = {plan.policy: plan for plan in found}
    base = by_policy.get(BACKFILLED) or by_policy.get(ISOLATED)
    if base is None or base is first or base.nodes is None or first.nodes is None:
        return ""
    fewer = percent(1 - first.nodes / base.nodes)
    cost, its = answer(first).cost, answer(base).cost
    if not its:
        return f": {fewer} fewer nodes than {base.policy}"
    saved = 1 - cost / its
    less = "less" if saved >= 0 else "more"
    return f": {fewer} fewer nodes than {base.policy}, at {percent(abs(saved))} {less} cost"


def _by_need(plan: CapacityPlan) -> tuple[int, float]:
    assert plan.nodes is not None
    return plan.nodes, answer(plan).cost


def _count(plan: CapacityPlan) -> str:
    nodes = plan.nodes or 0
    return f"{nodes:,} node{'s' if nodes != 1 else ''} ({answer(plan).gpus:,} training GPUs)"


def _listed(names: Sequence[str], last: str) -> str:
    """`a, b and c`."""
    return f" {last} ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
