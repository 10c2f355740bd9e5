"""`plexrl fidelity`: compares simulated cycles with a live cluster's history."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.terminal.context import Cells, Json, print_line, print_records, warn, write_json
from plexrl.cli.traces.prediction import SEEDS, WARM_UP_CYCLES, Policy, Seeds, WarmUp, histories

if TYPE_CHECKING:
    from plexrl.sim.fidelity.history import LeftOut
    from plexrl.sim.fidelity.planning import Planning
    from plexrl.sim.fidelity.values import CycleQuantiles, GroupCycles
    from plexrl.traces.convert.history import History


def fidelity(
    recording: Annotated[
        Path, typer.Argument(help="A recording by `plexrl traces record NAME.json`.")
    ],
    alone: Annotated[
        Path | None,
        typer.Option(help="A recording of the same jobs, by name, without sharing."),
    ] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Predict from this recording of the jobs' other runs instead."),
    ] = None,
    policy: Policy = None,
    warm_up: WarmUp = WARM_UP_CYCLES,
    seeds: Seeds = SEEDS,
    as_json: Json = False,
) -> None:
    """Compare measured cycle times with the simulator's: of a replay of the recording, or, with
    --from, of a prediction from other recordings of its jobs."""
    from plexrl.sim.fidelity.history import fidelity_of
    from plexrl.sim.fidelity.planning import planning_of
    from plexrl.sim.fidelity.values import fidelity_values

    (run,) = histories([recording])
    planning = planning_of([run], policy)
    if sources:
        if alone is not None:
            raise typer.BadParameter("--alone is for a replay; a prediction takes --from")
        _predict(run, histories(sources), planning, warm_up, range(1, seeds + 1), as_json)
        return
    found = fidelity_of(
        run,
        planning,
        alone=None if alone is None else histories([alone])[0],
        seeds=range(1, seeds + 1),
        warm_up=warm_up,
    )
    document = fidelity_values(found, planning.name)
    if as_json:
        write_json(asdict(document))
        return
    for group in document.groups:
        _print(group)
    _warn_left_out(document.left_out)


def _print(group: "GroupCycles") -> None:
    cells: Cells = {
        "job": lambda job: job.job,
        "cycles": lambda job: job.cycles,
        "measured p50 / p95": lambda job: _seconds(job.measured_s),
        "predicted p50 / p95": lambda job: _seconds(job.predicted_s),
        "error of a cycle p50 / p95": lambda job: (
            f"{100 * job.error.median:.1f} / {100 * job.error.p95:.1f} %"
        ),
        "by law p50": lambda job: _with_error(job.law_s, job.measured_s.median),
        "alone p50": lambda job: _with_error(job.alone_s, job.measured_s.median),
    }
    print_records(f"Group {group.group}", cells, group.jobs)
    errors, unwaited = group.error, group.alone_error
    print_line(
        f"Error over {group.cycles} cycles: median {100 * errors.median:.1f} %, 95th percentile "
        f"{100 * errors.p95:.1f} %; if no job waited: {100 * unwaited.median:.1f} % and "
        f"{100 * unwaited.p95:.1f} %."
    )


def _predict(
    run: "History",
    sources: "Sequence[History]",
    planning: "Planning",
    warm_up: int,
    seeds: Sequence[int],
    as_json: bool,
) -> None:
    from plexrl.sim.fidelity.run_forecast import forecast_run
    from plexrl.sim.fidelity.values import run_forecast_values

    found = forecast_run(run, sources, planning, seeds=seeds, warm_up=warm_up)
    document = run_forecast_values(found, planning.name)
    if as_json:
        write_json(asdict(document))
        return
    cells: Cells = {
        "job": lambda job: job.job,
        "cycles": lambda job: job.cycles,
        "measured mean / p95": lambda job: (
            f"{job.measured_mean_s:.2f} / {job.measured_p95_s:.2f} s"
        ),
        "predicted mean / p95": lambda job: f"{job.mean_s:.2f} / {job.p95_s:.2f} s",
        "error": lambda job: f"{100 * job.error:+.1f} %",
        "FIFO": lambda job: _with_error(job.fifo_s, job.measured_mean_s),
        "nobody waits": lambda job: _with_error(job.alone_s, job.measured_mean_s),
    }
    print_records("Mean cycles, predicted from other runs", cells, document.jobs)
    error, fifo, unwaited = document.error, document.fifo_error, document.alone_error
    print_line(
        f"Error over {len(document.jobs)} jobs: median {100 * error.median:.1f} %, 95th percentile "
        f"{100 * error.p95:.1f} %, mean {100 * error.mean:.1f} %; FIFO: mean "
        f"{100 * fifo.mean:.1f} %; nobody waits: mean {100 * unwaited.mean:.1f} %. Skill over "
        f"nobody waits {document.skill:.2f}, over FIFO {document.skill_over_fifo:.2f}."
    )
    _warn_left_out(document.left_out)


def _warn_left_out(jobs: "Sequence[LeftOut]") -> None:
    for job in jobs:
        warn(f"left out: {job.job}: {job.reason}")


def _seconds(quantiles: "CycleQuantiles") -> str:
    return f"{quantiles.median:.2f} / {quantiles.p95:.2f} s"


def _with_error(predicted_s: float | None, measured_s: float) -> str:
    if predicted_s is None:
        return ""
    return f"{predicted_s:.2f} s ({100 * (predicted_s / measured_s - 1.0):+.0f} %)"
