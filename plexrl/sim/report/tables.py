"""The report's tables as text. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.sim.report.comparison import Run
from plexrl.sim.report.units import ABSENT, duration, percent, short
from plexrl.sim.report.utilisation import part_of_cluster, trained
from plexrl.sim.result import Distribution

TENANTS_MAX = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under columns, the columns in named groups."""

    groups: tuple[tuple[str, int], ...]
    """(name, how many columns)."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    breaks: frozenset[int] = frozenset()
    """Rows that a line stands above."""


def summary(runs: Sequence[Run], gpus_per_node: int | None) -> Table:
    """Every run, with a row each: how long, and at what price."""
    columns = {
        "time": [duration(run.result.drain_s) for run in runs],
        "lower bound": [duration(run.result.bounds.bound_s) for run in runs],
    }
    if len(runs) > 1 and any(run.ratio is not None for run in runs):
        columns["of isolated"] = [percent(run.ratio) for run in runs]
        columns["gap recovered"] = [percent(run.recovered) for run in runs]
    waits = {
        "p50": [duration(run.result.wait.median) for run in runs],
        "p95": [duration(run.result.wait.p95) for run in runs],
    }
    bill = {
        "cost": [short(run.result.cost) for run in runs],
        "GPU-h a cycle": [short(run.result.gpu_hours_per_cycle) for run in runs],
    }
    among = {"fairness": [f"{run.result.fairness:.3f}" for run in runs]}
    return _table(
        runs,
        _cluster(runs, gpus_per_node),
        ("jobs", {"ended": [f"{run.result.jobs:,}" for run in runs]}),
        ("drain", columns),
        ("wait of jobs", waits),
        ("bill", bill),
        ("tenants", among),
    )


def slowdowns(runs: Sequence[Run], gpus_per_node: int | None) -> Table:
    """Every run, with a row each: what sharing costs its jobs, and what the GPUs do."""
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
        ("training GPUs", gpus),
        *([("losses", losses)] if broken else []),
    )


Part = tuple[str, dict[str, list[str]]]


def _table(runs: Sequence[Run], *parts: Part) -> Table:
    return Table(
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


def _cluster(runs: Sequence[Run], gpus_per_node: int | None) -> Part:
    gpus = {"GPUs": [f"{run.result.gpus:,}" for run in runs]}
    if gpus_per_node is None:
        return "cluster", gpus
    return "cluster", {
        "nodes": [f"{run.result.gpus / gpus_per_node:,g}" for run in runs],
        **gpus,
    }


def _quantiles(of: Sequence[Distribution]) -> dict[str, list[str]]:
    return {
        "median": [percent(distribution.median) for distribution in of],
        "mean": [percent(distribution.mean) for distribution in of],
        "p95": [percent(distribution.p95) for distribution in of],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantsTable:
    """Tenants of the drawn runs, with what was left out."""

    table: Table
    left_out: int
    """Tenants of the least GPU-hours."""


def tenants(runs: Sequence[Run]) -> TenantsTable | None:
    """A row a tenant, by its training GPU-hours in the first run; the last row is Jain's index.
    Absent where no run tells tenants apart."""
    shown = [run for run in runs if len(run.result.tenants) > 1]
    if not shown:
        return None
    of = [{tenant.tenant: tenant for tenant in run.result.tenants} for run in shown]
    first = {name: tenant.gpu_hours for tenants in reversed(of) for name, tenant in tenants.items()}
    names = sorted(first, key=lambda name: (-first[name], name))
    rows = []
    for name in names[:TENANTS_MAX]:
        cells = [tenants.get(name) for tenants in of]
        known = next(cell for cell in cells if cell is not None)
        rows.append(
            (
                name or "(none)",
                f"{known.jobs:,}",
                short(known.gpu_hours),
                *(ABSENT if cell is None else duration(cell.wait_mean_s) for cell in cells),
                *(ABSENT if cell is None else short(cell.slowdown_mean) for cell in cells),
            )
        )
    blank = ("",) * (2 + len(shown))
    rows.append(("fairness", *blank, *(f"{run.result.fairness:.3f}" for run in shown)))
    labels = tuple(run.label for run in shown)
    return TenantsTable(
        table=Table(
            groups=(("", 3), ("mean wait", len(shown)), ("mean slowdown, times alone", len(shown))),
            columns=("tenant", "jobs", "GPU-h", *labels, *labels),
            rows=tuple(rows),
        ),
        left_out=max(len(names) - TENANTS_MAX, 0),
    )
