"""Prints and writes the answers of `plexrl simulate`."""

from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from plexrl.cli.simulate.answers import Answers
from plexrl.cli.simulate.report import billed, report
from plexrl.cli.simulate.tables import (
    baselines,
    gap_recovered,
    print_bills,
    print_changes,
    print_plans,
    print_runs,
)
from plexrl.cli.terminal.context import print_line, warn, write_text
from plexrl.errors import InvalidRequestError
from plexrl.sim.report.bills import horizon_warning
from plexrl.sim.report.capacity import headline, meets_all
from plexrl.sim.results.bill import break_even
from plexrl.sim.results.headline import Band, Headline, headlines, whole_gpu_hours
from plexrl.sim.results.result_json import dumps, result_values, scenario_values, speed_values
from plexrl.sim.search.capacity_search import CapacityPlan
from plexrl.traces.io.files import write_whole

WRITTEN = ("results.json", "report.html")
"""Files in the folder of --out."""


def output(found: Answers, out: Path | None, *, as_json: bool) -> None:
    """Print the answers, and write them into the folder.

    Raises:
        InvalidRequestError: the folder cannot be written.
    """
    others = [(change.scenario, change.result) for change in found.changes]
    late = (horizon_warning(each) for each in (*billed(found.runs), *billed(others)))
    for message in dict.fromkeys(filter(None, late)):
        warn(f"plexrl: {message}")
    if as_json:
        write_text(document(found) + "\n")
    else:
        show(found)
    if out is not None:
        write(found, out, quiet=as_json)


def show(found: Answers) -> None:
    """Print the answers as tables."""
    if found.plans:
        print_plans(found.plans)
    if found.runs:
        print_runs(found.runs)
        print_bills(billed(found.runs))
    if found.changes:
        print_changes(found.runs, found.changes)
    for failure in found.failed:
        warn(f"plexrl: {failure.error.message}")


def document(found: Answers) -> str:
    """The answers as JSON; equal questions give equal text except `speed`."""
    unshared = baselines(found.runs)
    survey = found.survey
    return dumps(
        {
            "version": version("plexrl"),
            "trace": {
                "name": found.trace,
                "jobs": survey.jobs,
                "arrivals_s": survey.arrivals_s,
                "gpus_max": survey.gpus_max,
                "jobs_without_rollout_gpus": survey.without_rollout_gpus,
                "busy_gpu_hours": survey.busy_gpu_s / 3600.0,
                "held_gpu_hours": survey.held_gpu_s / 3600.0,
            },
            "runs": [
                {
                    "scenario": scenario_values(scenario),
                    "result": result_values(result),
                    "break_even": break_even(scenario),
                    "gap_recovered": gap_recovered(scenario, result, unshared),
                    "whole_gpu_hours": whole_gpu_hours(result),
                }
                for scenario, result in found.runs
            ],
            "headline": headline(found.plans) if found.plans else None,
            "headlines": [_headline_values(each) for each in headlines(found.runs)],
            "smallest": [_plan_values(plan) for plan in found.plans],
            "what_if": [
                {
                    "what": change.what,
                    "of": change.of,
                    "ran": change.ran,
                    "scenario": scenario_values(change.scenario),
                    "result": result_values(change.result),
                }
                for change in found.changes
            ],
            "failed": [
                {"scenario": scenario_values(each.scenario), "error": each.error.to_wire()}
                for each in found.failed
            ],
            "speed": [speed_values(result.speed) for _, result in found.runs],
        }
    )


def check_folder(folder: Path) -> None:
    """Check before the runs that results can be written.

    Raises:
        InvalidRequestError: the folder is a file or cannot be created.
    """
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise InvalidRequestError(f"--out {folder}: {parent} is not a folder; name another")
    try:
        # Try to write: root's permissions do not show a read-only file system.
        with TemporaryDirectory(prefix=".plexrl-", dir=parent):
            pass
    except OSError as error:
        raise InvalidRequestError(
            f"--out {folder}: {parent} cannot be written ({error.strerror}); name another"
        ) from error
    for name in WRITTEN:
        if (folder / name).is_dir():
            raise InvalidRequestError(
                f"--out {folder}: {folder / name} is a folder instead of a file; name another"
            )


def write(found: Answers, folder: Path, *, quiet: bool) -> None:
    """Write `results.json`, and `report.html` if its packages are installed.

    Raises:
        InvalidRequestError: the folder cannot be written.
    """
    written = [folder / WRITTEN[0]]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(written[0], document(found) + "\n")
        if found.runs:
            page = report(found.trace, found.survey, found.runs, found.plans, found.changes, folder)
            written += [page] if page else []
    except OSError as error:
        raise InvalidRequestError(f"cannot write to {folder}: {error}") from error
    if not quiet:
        print_line("Written: " + ", ".join(map(str, written)))


def _headline_values(line: Headline) -> dict[str, object]:
    def band(values: Band) -> dict[str, float]:
        return {"median": values.median, "lowest": values.values[0], "highest": values.values[-1]}

    return {
        "policy": line.scenario.policy,
        "gpus": line.scenario.gpus,
        "baseline": line.baseline,
        "seeds": line.seeds,
        "drain": band(line.drain),
        "whole_gpu_hours": band(line.whole),
        "gap_recovered": None if line.recovered is None else band(line.recovered),
        "quickest": line.is_quickest,
        "text": line.text,
    }


def _plan_values(plan: CapacityPlan) -> dict[str, object]:
    return {
        "policy": plan.policy,
        "nodes": plan.nodes,
        "failing_from": plan.search.failing_from,
        "monotone": plan.search.is_monotone,
        "objectives": [objective.text for objective in plan.objectives],
        "broken_budgets": [broken_budget.text for broken_budget in plan.broken_budgets],
        "probes": [
            {
                "nodes": size,
                "gpus": plan.results[size].gpus,
                "met": met,
                "met_all": meets_all(plan, size),
                "cost": plan.results[size].cost,
                "drain_s": plan.results[size].drain_s,
                "values": {
                    objective.text: objective.value(plan.results[size])
                    for objective in plan.objectives
                },
            }
            for size, met in plan.search.probes.items()
        ],
    }
