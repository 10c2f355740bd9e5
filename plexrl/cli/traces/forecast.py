"""`plexrl forecast`: predicts the cycles of jobs that would share, from recordings of them."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.terminal.context import Cells, Json, print_records, write_json
from plexrl.cli.traces.prediction import SEEDS, WARM_UP_CYCLES, Policy, Seeds, WarmUp, histories


def forecast(
    recordings: Annotated[
        list[Path], typer.Argument(help="Recordings by `plexrl traces record NAME.json`.")
    ],
    jobs: Annotated[
        list[str], typer.Option("--job", help="A recorded job to run, or several: NAME=COUNT.")
    ],
    policy: Policy = None,
    groups: Annotated[
        int, typer.Option(min=1, help="Node groups that the jobs can be placed on.")
    ] = 1,
    cycles: Annotated[int, typer.Option(min=1, help="Cycles of the job with the longest.")] = 100,
    warm_up: WarmUp = WARM_UP_CYCLES,
    seeds: Seeds = SEEDS,
    as_json: Json = False,
) -> None:
    """Predict the cycle times of a mix of jobs from recordings of their runs in other mixes."""
    from plexrl.sim.fidelity.planning import planning_of
    from plexrl.sim.fidelity.run_forecast import forecast_mix

    sources = histories(recordings)
    planning = planning_of(sources, policy)
    found = forecast_mix(
        _copies(jobs),
        sources,
        planning,
        cycles=cycles,
        seeds=range(1, seeds + 1),
        warm_up=warm_up,
        groups=groups,
    )
    if as_json:
        write_json({"policy": planning.name, "jobs": [asdict(job) for job in found]})
        return
    cells: Cells = {
        "job": lambda job: job.job,
        "cycle mean / p95": lambda job: f"{job.mean_s:.2f} / {job.p95_s:.2f} s",
        "alone": lambda job: f"{job.alone_s:.2f} s",
        "slowdown": lambda job: f"{100 * (job.mean_s / job.alone_s - 1.0):+.1f} %",
        "with FIFO": lambda job: f"{job.fifo_s:.2f} s",
    }
    print_records(f"Predicted cycles under {planning.name}", cells, found)


def _copies(jobs: list[str]) -> dict[str, int]:
    """Numbers of copies by name. A name that is given twice counts twice."""
    copies: dict[str, int] = {}
    for text in jobs:
        name, equals, count = text.partition("=")
        if not name or (equals and not (count.isdecimal() and int(count) > 0)):
            raise typer.BadParameter(f"{text!r}: write it as NAME or NAME=COUNT, as actor-7b=2")
        copies[name] = copies.get(name, 0) + (int(count) if equals else 1)
    return copies
