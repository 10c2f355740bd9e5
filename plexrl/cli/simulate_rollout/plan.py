"""`plexrl plan-rollout`: which way to run a job would pay."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.terminal.context import Json, print_line, print_table, write_json
from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from plexrl.latency.models import Model
    from plexrl.sim.rollout.plan.modes import Mode
    from plexrl.sim.rollout.plan.planning import PlannedMode, ProfiledJob

MEASURED_MIN = 8
"""Least decode steps to which the rollout service fits its cost model."""


def plan_rollout(
    profile: Annotated[
        Path, typer.Argument(help="A profile: plexrl rollouts JOB --profile NAME > profile.json.")
    ],
    gpus: Annotated[
        int | None, typer.Option(min=2, help="GPUs of the job; default: as many as it has.")
    ] = None,
    staleness: Annotated[
        str, typer.Option(help="Staleness bounds that are tried, with commas between.")
    ] = "1,2,3",
    model: Annotated[
        str | None,
        typer.Option(help="Latencies of this model (simulate-rollout --model), not the measured."),
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(help="GPUs of --model: h800 (default), h100, h20 or a40.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the drawn lengths.")] = 3,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: one per core.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Which rollout mode would pay for a job: simulates them all from its profile."""
    from plexrl.cli.simulate_rollout.options import RolloutClusterOptions, engine, numbers
    from plexrl.client.data.rollout_profile import rollout_profile_from_json
    from plexrl.sim.rollout.plan.modes import modes
    from plexrl.sim.rollout.plan.planning import ProfiledJob

    try:
        found = rollout_profile_from_json(profile.read_bytes())
    except OSError as error:
        raise InvalidRequestError(f"{profile} cannot be read: {error}") from error
    chosen: Model | None = None
    if model is not None:
        size = found.instance_gpus
        cluster = RolloutClusterOptions(model=model, gpu_type=gpu_type, tensor_parallel=size)
        chosen = engine(cluster)[0]
    elif gpu_type is not None:
        raise InvalidRequestError("--gpu-type is of --model: give a model")
    job = ProfiledJob(profile=found, gpus=gpus or 0, model=chosen)
    asked = modes(numbers("--staleness", staleness), has_model=chosen is not None)
    rows = _run(job, asked, list(range(seeds)), workers, quiet=as_json)
    if as_json:
        write_json({"profile": str(profile), "seeds": seeds, "modes": [e.values() for e in rows]})
    else:
        show(job, rows)


def _run(
    job: "ProfiledJob",
    modes: "Sequence[Mode]",
    seeds: Sequence[int],
    workers: int | None,
    *,
    quiet: bool,
) -> "list[PlannedMode]":
    from plexrl.cli.simulate_rollout.progress import run_display
    from plexrl.sim.rollout.plan.planning import plan_modes
    from plexrl.sim.rollout.results.outcome import RolloutOutcome
    from plexrl.sim.rollout.runs.split import runner

    # Impossible settings are found before anything runs.
    job.setting(seeds[0], job.sizes()[0])
    display = run_display(quiet)
    with display, runner(workers) as run:
        task = display.add_task("simulating", total=None, status="")

        def ran(outcome: RolloutOutcome) -> None:
            display.update(task, advance=1, status=outcome.system.label)

        return plan_modes(run, job, modes, seeds, ran)


def show(job: "ProfiledJob", rows: "Sequence[PlannedMode]") -> None:
    """Print the table, and how to choose what pays."""
    from plexrl.sim.rollout.plan.planning import recommend

    profile = job.profile
    responses = [tokens for length in profile.lengths for tokens in length.response_tokens]
    print_line(
        f"{profile.prompts} prompts of {profile.samples} samples, {len(responses):,} measured: "
        f"{sum(responses) / len(responses):,.0f} tokens on average, at most {max(responses):,}"
    )
    if profile.measured_steps < MEASURED_MIN and job.model is None:
        print_line(
            f"Only {profile.measured_steps} decode steps were measured: the latencies are those of "
            "a 30B model on H20"
        )
    table = [
        (
            row.mode.name,
            f"{row.rollout_gpus}, shared"
            if row.shares_gpus
            else f"{row.rollout_gpus} + {row.train_gpus}",
            f"{row.tensor_parallel}",
            row.mode.trained,
            f"{row.gain:.2f} ±{row.spread:.2f}",
        )
        for row in rows
    ]
    print_table("", ("mode", "GPUs", "TP", "trained samples", "gain"), table)
    chosen = recommend(rows)
    if not chosen:
        print_line("No mode would gain more than 2 %: keep the synchronous loop.")
    for each in chosen:
        kind = "on-policy" if each.mode.is_on_policy else each.mode.trained
        print_line(f"Best, {kind}: {each.mode.name}, {each.gain:.2f} times the synchronous loop:")
        for line in each.python:
            print_line(f"    {line}")
