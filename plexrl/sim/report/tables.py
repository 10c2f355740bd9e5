"""The report's tables as text. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plexrl.sim.report.plots.utilisation import part_of_cluster, trained
from plexrl.sim.report.units import ABSENT, duration, percent, short
from plexrl.sim.results.comparison import LabelledRun
from plexrl.sim.results.result import DistributionSummary, TenantResult

TENANTS_MAX = 50
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTable:
    """Rows of text under columns, the columns in named groups."""

    groups: tuple[tuple[str, int], ...]
    """(name, how many columns)."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    breaks: frozenset[int] = frozenset()
    """Rows with a separator line above."""


def summary(runs: Sequence[LabelledRun], gpus_per_node: int | None) -> ReportTable:
    """One row per run: times and cost."""
    columns = {
        "time": [duration(run.result.drain_s) for run in runs],
        "lower bound": [duration(run.result.bounds.bound_s) for run in runs],
    }
    if len(runs) > 1 and any(run.ratio is not None for run in runs):
        names = {run.baseline for run in runs} - {""}
        of = f"of {names.pop()}" if len(names) == 1 else "of baseline"
        columns[of] = [percent(run.ratio) for run in runs]
        columns["gap recovered"] = [percent(run.recovered) for run in runs]
    waits = {
        "p50": [duration(run.result.wait.median) for run in runs],
        "p95": [duration(run.result.wait.p95) for run in runs],
    }
    bill = {
        "cost": [short(run.result.cost) for run in runs],
        "cluster GPU-h": [short(run.result.gpus * run.result.drain_s / HOUR_S) for run in runs],
        "rollout GPU-h": [short(run.result.rollout_gpu_hours) for run in runs],
        "GPU-h a cycle": [short(run.result.gpu_hours_per_cycle) for run in runs],
    }
    among = {"worst": [short(run.result.worst_tenant) for run in runs]}
    return _table(
        runs,
        _cluster(runs, gpus_per_node),
        ("jobs", {"ended": [f"{run.result.jobs:,}" for run in runs]}),
        ("drain", columns),
        ("wait of jobs", waits),
        ("bill", bill),
        ("tenants", among),
    )


def slowdowns(runs: Sequence[LabelledRun], gpus_per_node: int | None) -> ReportTable:
    """One row per run: slowdowns of its jobs, and the use of the GPUs."""
    gpus = {
        "train": [percent(trained(run)) for run in runs],
        "switch": [percent(part_of_cluster(run, run.result.switch_gpu_hours)) for run in runs],
        "in a group": [
            percent(part_of_cluster(run, run.result.training_gpu_hours)) for run in runs
        ],
        "switches": [f"{run.result.switches:,}" for run in runs],
    }
    completion = [run.result.completion for run in runs]
    losses = {
        "failures": [f"{run.result.failures:,}" for run in runs],
        "jobs given up": [f"{run.result.failed_jobs:,}" for run in runs],
    }
    broken = any(run.result.failures or run.result.failed_jobs for run in runs)
    return _table(
        runs,
        _cluster(runs, gpus_per_node),
        ("slowdown of cycles", _quantiles([run.result.cycle_slowdown for run in runs])),
        ("slowdown of placed jobs", _quantiles([run.result.job_slowdown for run in runs])),
        (
            "completion, times alone",
            {
                "median": [short(times.median) for times in completion],
                "p95": [short(times.p95) for times in completion],
            },
        ),
        ("GPUs of the cluster", gpus),
        *([("losses", losses)] if broken else []),
    )


def gpu_hours(runs: Sequence[LabelledRun]) -> ReportTable:
    """Where the GPU-hours go: one row per state of a GPU, one column per run in percent of the
    cluster's GPU-hours, which are the last row."""
    parts = [run.result.where.parts() for run in runs]
    rows = [
        (
            name,
            *(
                percent(part_of_cluster(run, of[place][1]))
                for run, of in zip(runs, parts, strict=True)
            ),
        )
        for place, (name, _) in enumerate(parts[0])
        if any(of[place][1] for of in parts)
    ]
    tail = [percent(part_of_cluster(run, run.result.where.unallocated_tail)) for run in runs]
    rows.append(("of it in the tail", *tail))
    if any(run.result.where.unallocated_kept for run in runs):
        kept = [percent(part_of_cluster(run, run.result.where.unallocated_kept)) for run in runs]
        rows.append(("of it kept for a job", *kept))
    rows.append(("all GPU-hours", *(short(run.result.where.total) for run in runs)))
    return ReportTable(
        groups=(("", 1), ("part of the cluster's GPU-hours", len(runs))),
        columns=("GPUs", *(run.label for run in runs)),
        rows=tuple(rows),
        breaks=frozenset({len(rows) - 1}),
    )


Part = tuple[str, dict[str, list[str]]]


def _table(runs: Sequence[LabelledRun], *parts: Part) -> ReportTable:
    return ReportTable(
        groups=(("", 1), *((name, len(columns)) for name, columns in parts)),
        columns=("run", *(head for _, columns in parts for head in columns)),
        rows=tuple(
            (run.label, *(cells[place] for _, columns in parts for cells in columns.values()))
            for place, run in enumerate(runs)
        ),
        breaks=frozenset(
            place
            for place in range(1, len(runs))
            if runs[place].result.gpus != runs[place - 1].result.gpus
        ),
    )


def _cluster(runs: Sequence[LabelledRun], gpus_per_node: int | None) -> Part:
    gpus = {"GPUs": [f"{run.result.gpus:,}" for run in runs]}
    if gpus_per_node is None:
        return "cluster", gpus
    return "cluster", {
        "nodes": [f"{run.result.gpus / gpus_per_node:,g}" for run in runs],
        **gpus,
    }


def _quantiles(of: Sequence[DistributionSummary]) -> dict[str, list[str]]:
    return {
        "median": [percent(distribution.median) for distribution in of],
        "mean": [percent(distribution.mean) for distribution in of],
        "p95": [percent(distribution.p95) for distribution in of],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsTables:
    """Tables of the tenants of the plotted runs."""

    waits: ReportTable
    slowdowns: ReportTable
    left_out: int
    """Number of omitted tenants, those with the fewest GPU-hours."""


def tenants(runs: Sequence[LabelledRun]) -> TenantsTables | None:
    """One row per tenant, ordered by training GPU-hours in the first run, and one column per run.
    Absent if no run has several tenants."""
    shown = [run for run in runs if len(run.result.tenants) > 1]
    if not shown:
        return None
    of = [{tenant.tenant: tenant for tenant in run.result.tenants} for run in shown]
    # The values of each tenant in the first run that has it.
    known = {name: tenant for rows in reversed(of) for name, tenant in rows.items()}
    names = sorted(known, key=lambda name: (-known[name].gpu_hours, name))
    heads = [
        (name or "(none)", f"{known[name].jobs:,}", short(known[name].gpu_hours))
        for name in names[:TENANTS_MAX]
    ]
    cells = [[rows.get(name) for rows in of] for name in names[:TENANTS_MAX]]
    waits = [[_cell(cell, lambda t: duration(t.wait_mean_s)) for cell in row] for row in cells]
    times = [[_cell(cell, lambda t: short(t.slowdown_mean)) for cell in row] for row in cells]
    worst = ("worst", "", "", *(short(run.result.worst_tenant) for run in shown))

    def table(title: str, rows: Sequence[Sequence[str]]) -> ReportTable:
        return ReportTable(
            groups=(("", 3), (title, len(shown))),
            columns=("tenant", "jobs", "GPU-h", *(run.label for run in shown)),
            rows=tuple((*head, *row) for head, row in zip(heads, rows, strict=True)),
        )

    slow = table("mean completion, times alone", times)
    return TenantsTables(
        waits=table("mean wait", waits),
        slowdowns=replace(slow, rows=(*slow.rows, worst), breaks=frozenset({len(heads)})),
        left_out=len(names) - len(heads),
    )


def _cell(tenant: TenantResult | None, text: Callable[[TenantResult], str]) -> str:
    return ABSENT if tenant is None else text(tenant)
