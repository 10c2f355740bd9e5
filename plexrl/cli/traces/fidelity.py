"""`plexrl fidelity`: compares simulated cycles with a live cluster's history."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.cli.terminal.context import Json, print_line, print_table, warn, write_json

if TYPE_CHECKING:
    from plexrl.sim.fidelity.fidelity import CycleError, Errors
    from plexrl.sim.fidelity.history import GroupFidelity, HistoryFidelity

COLUMNS = (
    *("job", "cycles", "measured p50 / p95", "predicted p50 / p95", "error of a cycle p50 / p95"),
    *("by law p50", "alone p50"),
)


def fidelity(
    recording: Annotated[
        Path, typer.Argument(help="A recording by `plexrl traces record NAME.json`.")
    ],
    alone: Annotated[
        Path | None,
        typer.Option(help="A recording of the same jobs, by name, without sharing."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Simulated policy; it should match the cluster's.")
    ] = "pack",
    warm_up: Annotated[
        int, typer.Option(min=0, help="First cycles of each job that are not compared.")
    ] = 3,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the drawn predictions.")] = 5,
    as_json: Json = False,
) -> None:
    """Replay a live cluster's history, and compare predicted with measured cycle times."""
    from plexrl.sim.fidelity.history import fidelity_of
    from plexrl.traces.convert.history import read_history

    found = fidelity_of(
        read_history(recording),
        policy,
        alone=None if alone is None else read_history(alone),
        seeds=range(1, seeds + 1),
        warm_up=warm_up,
    )
    if as_json:
        write_json(_values(found, policy))
        return
    for group in found.groups:
        _print(group)
    for each in found.left_out:
        warn(f"left out: {each.job}: {each.reason}")


def _values(found: "HistoryFidelity", policy: str) -> dict[str, Any]:
    return {
        "policy": policy,
        "groups": [
            {
                "group": group.group,
                "cycles": len(group.recorded.cycles),
                "error": _errors(group.recorded.errors),
                "alone_error": _errors(group.recorded.alone_errors),
                "jobs": [_job_values(group, job.job) for job in group.recorded.jobs],
            }
            for group in found.groups
        ],
        "left_out": [{"job": each.job, "reason": each.reason} for each in found.left_out],
    }


def _job_values(group: "GroupFidelity", job: str) -> dict[str, Any]:
    from plexrl.sim.fidelity.fidelity import errors_of

    cycles = _cycles(group, job)
    laws = {each.job: each.predicted_s for each in group.drawn}
    return {
        "job": job,
        "cycles": len(cycles),
        "measured_s": _quantiles([cycle.measured_s for cycle in cycles]),
        "predicted_s": _quantiles([cycle.predicted_s for cycle in cycles]),
        "error": _errors(errors_of([cycle.error for cycle in cycles])),
        "law_s": laws.get(job),
        "alone_s": median(cycle.alone_s for cycle in cycles),
    }


def _print(group: "GroupFidelity") -> None:
    rows = []
    for job in group.recorded.jobs:
        values = _job_values(group, job.job)
        was, predicted, error = values["measured_s"], values["predicted_s"], values["error"]
        rows.append(
            (
                job.job,
                values["cycles"],
                f"{was['median']:.2f} / {was['p95']:.2f} s",
                f"{predicted['median']:.2f} / {predicted['p95']:.2f} s",
                f"{100 * error['median']:.1f} / {100 * error['p95']:.1f} %",
                _with_error(values["law_s"], was["median"]),
                _with_error(values["alone_s"], was["median"]),
            )
        )
    print_table(f"Group {group.group}", COLUMNS, rows)
    errors, unwaited = group.recorded.errors, group.recorded.alone_errors
    print_line(
        f"Error over {len(group.recorded.cycles)} cycles: median {100 * errors.median:.1f} %, 95th "
        f"percentile {100 * errors.p95:.1f} %; if no job waited: {100 * unwaited.median:.1f} % and "
        f"{100 * unwaited.p95:.1f} %."
    )


def _cycles(group: "GroupFidelity", job: str) -> "list[CycleError]":
    return [cycle for cycle in group.recorded.cycles if cycle.job == job]


def _quantiles(values: list[float]) -> dict[str, float]:
    from plexrl.sim.fidelity.fidelity import p95_of

    return {"median": median(values), "p95": p95_of(values)}


def _errors(errors: "Errors") -> dict[str, float]:
    return {"median": errors.median, "mean": errors.mean, "p95": errors.p95}


def _with_error(predicted_s: float | None, measured_s: float) -> str:
    if predicted_s is None:
        return ""
    return f"{predicted_s:.2f} s ({100 * (predicted_s / measured_s - 1.0):+.0f} %)"
