"""The report's tables as text. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from plexrl.sim.report.comparison import Run
from plexrl.sim.report.units import ABSENT, duration, percent, short
from plexrl.sim.report.utilisation import trained

TENANTS_MAX = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under columns, the columns in named groups."""

    groups: tuple[tuple[str, int], ...]
    """(name, how many columns)."""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary(runs: Sequence[Run], gpus_per_node: int | None) -> Table:
    """Every run, with a row each. Columns of no meaning for these runs are left out."""
    compared = any(run.ratio is not None for run in runs) and len(runs) > 1
    broken = any(run.result.failures or run.result.failed_jobs for run in runs)
    parts = [
        _cluster(runs, gpus_per_node),
        _drain(runs, compared=compared),
        _wait(runs),
        _slowdown(runs),
        _gpus(runs),
        _cost(runs),
        *([_losses(runs)] if broken else []),
    ]
    return Table(
        groups=(("", 1), *((name, len(columns)) for name, columns in parts)),
        columns=("run", *(head for _, columns in parts for head in columns)),
        rows=tuple(
            (run.label, *(cells[place] for _, columns in parts for cells in columns.values()))
            for place, run in enumerate(runs)
        ),
    )


Part = tuple[str, dict[str, list[str]]]


def _cluster(runs: Sequence[Run], gpus_per_node: int | None) -> Part:
    columns = {"GPUs": [f"{run.result.gpus:,}" for run in runs]}
    if gpus_per_node is not None:
        nodes = [f"{run.result.gpus / gpus_per_node:,g}" for run in runs]
        columns = {"nodes": nodes, **columns}
    return "cluster", {**columns, "jobs ended": [f"{run.result.jobs:,}" for run in runs]}


def _drain(runs: Sequence[Run], *, compared: bool) -> Part:
    columns = {
        "time": [duration(run.result.drain_s) for run in runs],
        "lower bound": [duration(run.result.bounds.bound_s) for run in runs],
    }
    if compared:
        columns["by isolated"] = [percent(run.ratio) for run in runs]
        columns["gap recovered"] = [percent(run.recovered) for run in runs]
    return "drain", columns


def _wait(runs: Sequence[Run]) -> Part:
    return "wait of jobs", {
        "p50": [duration(run.result.wait.median) for run in runs],
        "p95": [duration(run.result.wait.p95) for run in runs],
    }


def _slowdown(runs: Sequence[Run]) -> Part:
    return "slowdown of cycles", {
        "median": [percent(run.result.cycle_slowdown.median) for run in runs],
        "mean": [percent(run.result.cycle_slowdown.mean) for run in runs],
        "p95": [percent(run.result.cycle_slowdown.p95) for run in runs],
    }


def _gpus(runs: Sequence[Run]) -> Part:
    return "GPUs", {
        "train": [percent(trained(run)) for run in runs],
        "GPU-h a cycle": [short(run.result.gpu_hours_per_cycle) for run in runs],
        "switches": [f"{run.result.switches:,}" for run in runs],
    }


def _cost(runs: Sequence[Run]) -> Part:
    return "bill", {
        "cost": [short(run.result.cost) for run in runs],
        "fairness": [f"{run.result.fairness:.3f}" for run in runs],
    }


def _losses(runs: Sequence[Run]) -> Part:
    return "losses", {
        "failures": [f"{run.result.failures:,}" for run in runs],
        "jobs given up": [f"{run.result.failed_jobs:,}" for run in runs],
    }


def job_slowdowns(runs: Sequence[Run]) -> Table:
    """How much longer jobs took once placed, and all in all."""
    return Table(
        groups=(("", 1), ("slowdown of jobs once placed", 4), ("completion by duration alone", 3)),
        columns=("run", "median", "mean", "p95", "p99", "median", "mean", "p95"),
        rows=tuple(
            (
                run.label,
                percent(run.result.job_slowdown.median),
                percent(run.result.job_slowdown.mean),
                percent(run.result.job_slowdown.p95),
                percent(run.result.job_slowdown.p99),
                short(run.result.completion.median),
                short(run.result.completion.mean),
                short(run.result.completion.p95),
            )
            for run in runs
        ),
    )


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
