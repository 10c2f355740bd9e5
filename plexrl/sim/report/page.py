"""Builds the HTML page of a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.sim.report.bills import Billed, bill_table, with_own_prices
from plexrl.sim.report.capacity import answer, certainty, probe_table
from plexrl.sim.report.capacity import headline as capacity_headline
from plexrl.sim.report.plots.bars import cost_plot, drain_plot
from plexrl.sim.report.plots.capacity import cost_curve, objective_plot
from plexrl.sim.report.plots.cumulative import completion_plot, wait_plot
from plexrl.sim.report.plots.figure import Plot, missing_package
from plexrl.sim.report.plots.gantt import gantt_plot
from plexrl.sim.report.plots.size_sweep import sweep_plot
from plexrl.sim.report.plots.style import looks
from plexrl.sim.report.plots.utilisation import utilisation_plot
from plexrl.sim.report.tables import ReportTable, gpu_hours, slowdowns, summary, tenants
from plexrl.sim.report.units import duration, percent
from plexrl.sim.results.comparison import DRAWN_RUNS_MAX, LabelledRun, compare, drawn, sizes
from plexrl.sim.results.gpu_hours import kept_sentence, tail_sentence
from plexrl.sim.results.result import SimResult
from plexrl.sim.search.capacity_search import CapacityPlan
from plexrl.traces.io.files import write_whole

if TYPE_CHECKING:
    from jinja2 import Template


def write_report(
    results: Sequence[SimResult],
    folder: Path,
    *,
    title: str,
    scenario_lines: Sequence[tuple[str, str]],
    labels: Sequence[str] = (),
    headline: Sequence[str] = (),
    plans: Sequence[CapacityPlan] = (),
    billed: Sequence[Billed] = (),
    gpus_per_node: int | None = None,
    window_s: tuple[float, float] | None = None,
) -> Path:
    """Write `report.html` into `folder` and return its path.

    The page is self-contained, and equal results give equal bytes: it excludes the speed of the
    runs. `scenario_lines`: (name, value) of the runs' common settings. `labels`: one name per run
    instead of its policy. `headline`: summary sentences. With `plans` the page begins with the
    searches for the smallest clusters, and the results are the runs on those. `billed`: runs whose
    prices the page explains. With `gpus_per_node` cluster sizes are shown in nodes too. `window_s`:
    the scenario's window, from the trace's start; absent: the extent of the results' spans.

    Raises:
        InvalidRequestError: there is no result, labels do not match the results, or matplotlib or
            jinja2 is not installed.
    """
    runs = compare(results, labels)
    own = with_own_prices(billed)
    # A search has one run per policy, each on a cluster of its own size.
    single = tuple(runs[:DRAWN_RUNS_MAX]) if plans else drawn(runs)
    page = page_template("report.html.j2").render(
        title=title,
        scenario_lines=scenario_lines,
        headline=headline,
        capacity=capacity(plans) if plans else None,
        summary=summary(runs, gpus_per_node),
        slowdowns=slowdowns(runs, gpus_per_node),
        gpu_hours=gpu_hours(single),
        notes=[(run.label, note) for run in single for note in _notes(run)],
        tenants=tenants(single),
        bills=bill_table(own) if own else None,
        sizes=sweep_plot(runs, looks(runs), gpus_per_node),
        plots=plots(runs, single, window_s),
        drawn_gpus=single[0].result.gpus if len(sizes(runs)) > 1 and not plans else None,
        drawn_runs=len(single),
        left_out=sum(bool(plans) or run.result.gpus == single[0].result.gpus for run in runs)
        - len(single),
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    write_whole(path, page)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySection:
    """The page's section on the smallest clusters."""

    headline: str
    notes: tuple[str, ...]
    """The certainty of each policy's answer."""
    plots: tuple[Plot, ...]
    probes: ReportTable


def capacity(plans: Sequence[CapacityPlan]) -> CapacitySection:
    """The section on the smallest clusters: text, plots and a table."""
    look = looks([LabelledRun(label=plan.policy, result=answer(plan)) for plan in plans])
    found = (objective_plot(plans, look), cost_curve(plans, look))
    return CapacitySection(
        headline=capacity_headline(plans),
        notes=tuple(certainty(plan) for plan in plans),
        plots=tuple(plot for plot in found if plot is not None),
        probes=probe_table(plans),
    )


def plots(
    runs: Sequence[LabelledRun],
    single: Sequence[LabelledRun],
    window_s: tuple[float, float] | None,
) -> tuple[Plot, ...]:
    """The plots of single runs that have data; colours are consistent with all runs."""
    look = looks(runs)
    found = (
        drain_plot(single, look),
        cost_plot(single, look),
        wait_plot(single, look),
        completion_plot(single, look),
        utilisation_plot(single, look),
        gantt_plot(single, window_s),
    )
    return tuple(plot for plot in found if plot is not None)


def page_template(name: str) -> "Template":
    """A template of this package's folder.

    Raises:
        InvalidRequestError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise missing_package(error) from error
    environment = Environment(
        loader=PackageLoader("plexrl.sim.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(duration=duration, percent=percent)
    return environment.get_template(name)


def _notes(run: LabelledRun) -> list[str]:
    """Sentences below the table of GPU-hours."""
    found = [tail_sentence(run.result.tail), kept_sentence(run.result.where)]
    return [each for each in found if each]
