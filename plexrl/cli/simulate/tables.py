"""The tables of `plexrl simulate`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plexrl.cli.terminal.context import plain_cell, print_line, terminal_width
from plexrl.sim.report.bills import Billed, bill_table, price_lines, with_own_prices
from plexrl.sim.report.capacity import certainty, headline, probe_table
from plexrl.sim.report.units import percent
from plexrl.sim.results.comparison import BACKFILLED, BASELINES, GAP_PART_MIN, ISOLATED, recovered
from plexrl.sim.results.gpu_hours import kept_sentence, tail_sentence
from plexrl.sim.results.headline import headlines, sentences
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.capacity_search import CapacityPlan
from plexrl.sim.search.objectives import utilisation
from plexrl.sim.workload.scenario import Scenario
from plexrl.sim.workload.source.survey import Survey

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Run = tuple[Scenario, SimResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The result of a changed run."""

    what: str
    of: int
    """Index of the original run."""
    scenario: Scenario
    result: SimResult
    ran: bool
    """Whether it was run; otherwise it was only repriced."""


WORDS_WIDTH = 22
"""Smallest width of text columns."""
UNBOUNDED = 10_000
"""Width in characters of a terminal that fits any table."""
PLAIN_WIDTH = 80
"""Width of tables in a pipe or a file, whose readers have editors and mails of this width; programs
read `--json`."""
HEADLINES_MAX = 12
NO_GAP = "\N{EN DASH}"
"""Shown if the gap is too small for a meaningful part."""
SLOWDOWN = "Slowdown"
LEFT = ("policy", "what if", "by")
"""Left-aligned text columns."""


def print_survey(trace: str, survey: Survey) -> None:
    """Print the total demand of the trace."""
    print_line(
        f"{trace}: {job_count(survey.jobs)} over {span(survey.arrivals_s)}, "
        f"up to {survey.gpus_max} GPUs each; they hold {hours(survey.held_gpu_s / 3600)} "
        f"GPU-hours alone, and need {percent(_part(survey.busy_gpu_s, survey.held_gpu_s))} of them."
    )


def print_runs(runs: Sequence[Run]) -> None:
    """Print one row per run, in one table if the terminal is wide enough."""
    unshared = baselines(runs)
    names = _run_names(runs)
    times: Columns = {}
    slower: Columns = {}
    gpus: Columns = {}
    for scenario, result in runs:
        _add(
            times,
            {
                "drain": span(result.drain_s),
                "bound": span(result.bounds.bound_s),
                "gap recovered": gap_cell(scenario, result, unshared),
                "wait p50": span(result.wait.median),
                "wait p95": span(result.wait.p95),
            },
        )
        _add(
            slower,
            {
                "job p50": percent(result.job_slowdown.median),
                "job mean": percent(result.job_slowdown.mean),
                "job p95": percent(result.job_slowdown.p95),
                "cycle p50": percent(result.cycle_slowdown.median),
                "cycle p95": percent(result.cycle_slowdown.p95),
                "jobs over SLO": f"{result.jobs_over_slo:,}",
                "worst tenant": f"{result.worst_tenant:,.1f}",
            },
        )
        _add(
            gpus,
            {
                "busy": percent(utilisation(result)),
                "cluster GPU-h": hours(result.gpus * result.drain_s / 3600),
                "rollout GPU-h": hours(result.rollout_gpu_hours),
                "filled GPU-h": hours(result.filled_gpu_hours) if result.filled_gpu_hours else "",
                "GPU-h /cycle": f"{result.gpu_hours_per_cycle:,.2f}",
                "switches": f"{result.switches:,}",
                "failures": f"{result.failures:,}" if result.failures else "",
                "failed jobs": f"{result.failed_jobs:,}" if result.failed_jobs else "",
                "cost": money(result.cost),
            },
        )
    jobs = max(result.jobs for _, result in runs)
    _print_groups(names, {job_count(jobs): times, SLOWDOWN: slower, "GPUs": gpus})
    _print_gpu_hours(runs)
    _print_notes(runs, unshared)


def _print_gpu_hours(runs: Sequence[Run]) -> None:
    """Print where the GPU-hours of the runs go, and how they end."""
    names = _run_names(runs)
    columns: Columns = {}
    for _, result in runs:
        total = result.where.total
        parts = [
            *result.where.parts(),
            ("of it tail", result.where.unallocated_tail),
            ("of it kept", result.where.unallocated_kept),
        ]
        _add(
            columns, {name: percent(_part(hours, total)) if hours else "" for name, hours in parts}
        )
        _add(columns, {"GPU-h": hours(total)})
    _print_groups(names, {"Where the GPU-hours go": columns})
    for place, (_, result) in enumerate(runs[:HEADLINES_MAX]):
        name = ", ".join(filter(None, (cells[place] for cells in names.values())))
        print_line(f"{name} nodes: {tail_sentence(result.tail)}.")
        if kept := kept_sentence(result.where):
            print_line(f"{name} nodes: {kept}.")


def _run_names(runs: Sequence[Run]) -> "Columns":
    """Policy, nodes and swept settings of each run."""
    names: Columns = {}
    varies = varying([scenario for scenario, _ in runs])
    for scenario, _ in runs:
        values = {"policy": scenario.policy, "nodes": nodes_of(scenario)}
        _add(names, values | {name: setting(scenario, name) for name in varies})
    return names


def _print_notes(runs: Sequence[Run], unshared: Mapping[Scenario, SimResult]) -> None:
    """Print notes on the table and the headlines."""
    if any(result.places_rollouts for _, result in runs):
        print_line("All figures count the whole cluster, with the GPUs of rollouts.")
    elif any(result.rollout_gpu_hours for _, result in runs):
        print_line(
            "Drain and bound count training GPUs only; cost and GPU-h/cycle also rollout GPUs."
        )
    else:
        print_line("All figures count training GPUs only: the trace has no rollout GPUs.")
    policies = {scenario.policy for scenario, _ in runs}
    names = {alone.policy for alone in unshared.values()}
    if names and len(policies) > 1:
        print_line(f"The baseline of all comparisons is {' or '.join(sorted(names))}.")
    if ISOLATED in policies:
        print_line(f"{ISOLATED} lets no job pass one that has waited 10 min; {BACKFILLED} does.")
    if any(gap_cell(*run, unshared) == NO_GAP for run in runs):
        print_line(
            f"{NO_GAP} The baseline is within {percent(GAP_PART_MIN)} of the bound: the gap is too "
            "small for a meaningful part."
        )
    lines = headline_texts(runs)
    for line in lines[:HEADLINES_MAX]:
        print_line(line)
    if len(lines) > HEADLINES_MAX:
        print_line(f"{len(lines) - HEADLINES_MAX} more comparisons are in --json and --out.")


def headline_texts(runs: Sequence[Run]) -> list[str]:
    """The headlines of the runs, each with its cluster if there are several."""
    lines = headlines(runs)
    scenarios = [line.scenario for line in lines]
    varies = varying(scenarios)
    by_nodes = len({nodes_of(scenario) for scenario in scenarios}) > 1
    names = [
        ", ".join(
            [f"nodes {nodes_of(scenario)}"] * by_nodes
            + [f"{name} {setting(scenario, name)}" for name in varies]
        )
        for scenario in scenarios
    ]
    return sentences(lines, names if any(names) else ())


def print_plans(plans: Sequence[CapacityPlan]) -> None:
    """Print the answer in one sentence, all sizes that were run, and the certainty."""
    print_line(headline(plans))
    table = probe_table(plans)
    # Allow line breaks between the parts of an objective, so that columns stay narrow.
    titles = [re.sub(r"(?=\.\D|[<>]=)", " ", name) for name in table.columns]
    columns = {
        name: [row[place] for row in table.rows]
        for place, name in enumerate(titles)
        if name != "GPUs"
    }
    names = {name: columns.pop(name) for name in ("policy", "nodes")}
    _print_groups(names, {"Sizes that were run": columns})
    for plan in plans:
        print_line(certainty(plan))


def print_bills(billed: Sequence[Billed]) -> None:
    """Print the bills of runs with prices of their own, and the break-even point."""
    shown = with_own_prices(billed)
    if not shown:
        return
    table = bill_table(shown)
    columns = {name: [row[place] for row in table.rows] for place, name in enumerate(table.columns)}
    names = {"policy": columns.pop("run"), "nodes": columns.pop("nodes")}
    _print_groups(names, {"Bills": columns})
    for name, value in price_lines(shown[0].scenario):
        print_line(f"{name}: {value}")


def print_changes(runs: Sequence[Run], changes: Sequence[Changed]) -> None:
    """Print the what-ifs and their figures."""
    names: Columns = {}
    figures: Columns = {}
    for change in changes:
        (scenario, was), now = runs[change.of], change.result
        _add(
            names, {"what if": change.what, "policy": scenario.policy, "nodes": nodes_of(scenario)}
        )
        _add(
            figures,
            {
                "drain": difference(was.drain_s, now.drain_s, span(now.drain_s)),
                "wait p95": difference(was.wait.p95, now.wait.p95, span(now.wait.p95)),
                "slowdown p50": percent(now.job_slowdown.median),
                "cost": money(now.cost),
                "cost by": difference(was.cost, now.cost, money(now.cost)),
                "by": "run" if change.ran else "priced",
            },
        )
    _print_groups(names, {"What if, by how much of what it was": figures})


def baselines(runs: Sequence[Run]) -> dict[Scenario, SimResult]:
    """The baseline of each scenario (without its policy): `isolated+backfill`, else `isolated`."""
    return {
        _any_policy(scenario): result
        for name in reversed(BASELINES)
        for scenario, result in runs
        if scenario.policy == name
    }


def gap_recovered(
    scenario: Scenario, result: SimResult, unshared: Mapping[Scenario, SimResult]
) -> float | None:
    """Recovered part of the gap between the baseline's drain time and the bound; None without a
    baseline or without a gap, and for the baseline."""
    alone = unshared.get(_any_policy(scenario))
    if alone is None or scenario.policy == alone.policy:
        return None
    return recovered(result, alone)


def gap_cell(scenario: Scenario, result: SimResult, unshared: Mapping[Scenario, SimResult]) -> str:
    """`gap_recovered` as text, or how much longer the run takes than the baseline."""
    alone = unshared.get(_any_policy(scenario))
    if alone is None or scenario.policy == alone.policy:
        return ""
    longer = result.drain_s / alone.drain_s - 1.0 if alone.drain_s > 0 else 0.0
    if longer > 0.0:
        return f"{percent(longer)} longer"
    gap = recovered(result, alone)
    return NO_GAP if gap is None else percent(gap)


def nodes_of(scenario: Scenario) -> str:
    """The nodes of all pools as text."""
    if len(scenario.pools) == 1:
        return f"{scenario.pools[0].nodes:,}"
    return " + ".join(f"{pool.nodes:,} {pool.node_type.name}" for pool in scenario.pools)


def span(value_s: float) -> str:
    """A duration as text in a suitable unit."""
    for unit, length_s in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if value_s >= 2 * length_s:
            return f"{value_s / length_s:,.1f} {unit}"
    return f"{value_s:.1f} s" if value_s else "0"


def job_count(jobs: int) -> str:
    """A count such as `1 job` or `2 jobs`."""
    return f"{jobs:,} job" if jobs == 1 else f"{jobs:,} jobs"


def hours(value: float) -> str:
    """Whole hours."""
    return f"{value:,.0f}"


def money(value: float) -> str:
    """An amount of money, without decimals from 100 on."""
    return f"{value:,.0f}" if value >= 100 or not value else f"{value:.2f}"


def difference(was: float, now: float, absolute: str) -> str:
    """The relative change, or `absolute` if `was` is 0."""
    if was == now:
        return "="
    return f"{100 * (now - was) / was:+.1f} %" if was else f"+{absolute}"


def _part(of: float, whole: float) -> float:
    return of / whole if whole else 0.0


def _any_policy(scenario: Scenario) -> Scenario:
    return replace(scenario, policy="")


_SETTINGS = ("seed", "jitter", "staleness", "load", "switch", "starvation")


def setting(scenario: Scenario, name: str) -> str:
    """A swept setting as text; empty if it comes from the trace."""
    value = {
        "seed": scenario.seed,
        "jitter": scenario.behaviour.jitter,
        "staleness": scenario.behaviour.staleness,
        "load": scenario.load_max,
        "switch": scenario.switch_s,
        "starvation": scenario.starvation_bound_s,
    }[name]
    if value is None:
        return ""
    # `g` would shorten seeds of more than six digits.
    return str(value) if isinstance(value, int) else f"{value:g}"


def varying(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """Names of differing settings, except policy and size."""
    return tuple(
        name for name in _SETTINGS if len({setting(scenario, name) for scenario in scenarios}) > 1
    )


Columns = dict[str, list[str]]
"""Cells by column name."""


def _add(columns: Columns, cells: Mapping[str, str]) -> None:
    for name, cell in cells.items():
        columns.setdefault(name, []).append(cell)


def _print_groups(names: Columns, groups: Mapping[str, Columns]) -> None:
    """Print all groups in one table with `names`, or one table per group on a narrow terminal.
    Columns without any text are omitted."""
    shown = {title: _non_empty(columns) for title, columns in groups.items()}
    joined: Columns = {
        f"{title.lower()} {name}" if title == SLOWDOWN else name: cells
        for title, columns in shown.items()
        for name, cells in columns.items()
    }
    from rich.console import Console

    console = Console(width=terminal_width() or PLAIN_WIDTH)
    one = _table(next(iter(groups)), {**names, **joined})
    unbounded = console.options.update(max_width=UNBOUNDED)
    if console.measure(one, options=unbounded).minimum <= console.width:
        console.print(one)
        return
    for title, columns in shown.items():
        for part in _fitting(names, columns, console):
            console.print(_table(title, {**names, **part}))


def _fitting(names: Columns, columns: Columns, console: "Console") -> list[Columns]:
    """The columns of a group, split into parts that fit the terminal."""
    unbounded = console.options.update(max_width=UNBOUNDED)
    width = console.measure(_table("", {**names, **columns}), options=unbounded).minimum
    if width <= console.width or len(columns) < 2:
        return [columns]
    cells = list(columns.items())
    half = (len(cells) + 1) // 2
    return [
        part
        for some in (cells[:half], cells[half:])
        for part in _fitting(names, dict(some), console)
    ]


def _non_empty(columns: Columns) -> Columns:
    return {name: cells for name, cells in columns.items() if any(cells)}


def _table(title: str, columns: Columns) -> "Table":
    from rich import box
    from rich.table import Table

    on_terminal = terminal_width() is not None
    table = Table(
        title=plain_cell(title),
        title_justify="left",
        # A program that reads the lines meets no rules.
        box=box.SIMPLE_HEAD if on_terminal else None,
        pad_edge=on_terminal,
        padding=(0, 1, 0, 0),
    )
    for name, cells in columns.items():
        if name in LEFT:
            width = max(len(text) for text in (*cells, name))
            table.add_column(name, overflow="fold", min_width=min(width, WORDS_WIDTH))
        else:
            # A heading has one line per word, a number one line.
            words = name.split() or [""]
            width = max(len(text) for text in (*cells, *words))
            table.add_column("\n".join(words), justify="right", min_width=width)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(plain_cell(cell) for cell in row))
    return table
