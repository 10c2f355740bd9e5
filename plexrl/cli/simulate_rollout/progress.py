"""Runs the systems of `plexrl simulate-rollout` and shows how far they are."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from plexrl.sim.rollout.report.histories import History
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.runs.split import best_splits, runner
from plexrl.sim.rollout.setting import (
    Parts,
    Setting,
    Strategies,
    System,
    SystemName,
    check_system,
)

if TYPE_CHECKING:
    from rich.progress import Progress


def run_all(
    settings: Sequence[Setting],
    systems: Sequence[System],
    *,
    workers: int | None,
    with_histories: bool,
    quiet: bool,
) -> tuple[list[RolloutOutcome], list[History]]:
    """The best outcome of each system in each setting, and the histories for the report.

    Raises:
        InvalidRequestError: a split of the GPUs is impossible.
    """
    questions = [(setting, system) for setting in settings for system in systems]
    for setting, system in questions:
        check_system(setting, system)
    display = run_display(quiet)
    with display, runner(workers) as run:
        task = display.add_task("simulating", total=None, status="")

        def ran(outcome: RolloutOutcome) -> None:
            gpus = outcome.system.rollout_gpus
            status = f"{outcome.system.label}, {gpus} rollout GPUs: {outcome.throughput:,.0f}/s"
            display.update(task, advance=1, status=status)

        found = best_splits(run.outcome, questions, on_run=ran)
        histories = []
        if with_histories:
            chosen = _shown(settings, found)
            futures = [run.history(setting, outcome.system) for setting, outcome in chosen]
            for (setting, outcome), future in zip(chosen, futures, strict=True):
                display.update(task, advance=1, status=f"{outcome.system.label}, history")
                histories.append((setting, outcome, future.result()))
    return found, histories


def run_display(quiet: bool) -> "Progress":
    """A line on the terminal with the number of runs; a task has the field `status`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TextColumn("{task.completed} runs"),
        TextColumn("{task.fields[status]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )


def _shown(
    settings: Sequence[Setting], outcomes: Sequence[RolloutOutcome]
) -> list[tuple[Setting, RolloutOutcome]]:
    """Runs whose history the report shows: at the highest limit, each system with its largest
    bound and all of its parts, the coordinator's first, and StaleFlow without its strategies."""
    setting = max(settings, key=lambda each: each.workload.limit)
    best: dict[tuple[SystemName, Strategies], RolloutOutcome] = {}
    for outcome in outcomes:
        system = outcome.system
        is_whole = system.strategies in _SHOWN and system.parts == Parts()
        if outcome.limit != setting.workload.limit or not is_whole:
            continue
        key = (system.name, system.strategies)
        if key not in best or best[key].system.staleness < system.staleness:
            best[key] = outcome
    order = list(SystemName)[::-1]
    ordered = sorted(best.values(), key=lambda each: order.index(each.system.name))
    return [(setting, each) for each in ordered]


_SHOWN = (Strategies(), Strategies(routing=False, synchronization=False, migration=False))
