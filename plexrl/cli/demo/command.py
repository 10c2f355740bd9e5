"""`plexrl demo`: trains two jobs on one shared pool and writes a report."""

from pathlib import Path
from typing import Annotated

import typer

from plexrl.cli.terminal.context import Json, write_json
from plexrl.cli.terminal.option_groups import given_options, option_name
from plexrl.model.parallelism import Parallelism

STEPS, PACED_STEPS = 150, 8


ONLY_COMPUTED = {"workers", "backend", "layout", "isolated"}
"""Options without effect on a paced demo."""


def demo(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("out/demo"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="RL steps of each job; default: 150.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of models, data and sampling.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Workers of a training group.")] = 2,
    backend: Annotated[str | None, typer.Option(help="Training backend; default: fsdp.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="Layout of a training group, as dp=1,tp=2; default: dp=workers."),
    ] = None,
    isolated: Annotated[bool, typer.Option(help="Also measure the isolated baseline.")] = True,
    paced: Annotated[
        bool,
        typer.Option(
            "--paced",
            help="Compute nothing: two tenants whose steps sleep as long as those of the published "
            "7B profile, a hundred times shorter. Takes --out, --seed, --steps (8 unless given) "
            "and --json only.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train two tenants' jobs on one shared group, then each alone; write a report."""
    from rich.console import Console

    from plexrl.process.extras import check_extras

    # Also what the report needs, which is written at the end.
    check_extras("plexrl demo", "server", "worker", "demo")
    if paced:
        from plexrl.cli.demo.paced import PacedOptions, run_paced_demo

        idle = sorted(given_options(context).keys() & ONLY_COMPUTED)
        if idle:
            raise typer.BadParameter(
                f"{option_name(idle[0])} has no effect with --paced: leave one of both out"
            )
        given = PacedOptions(out=out, seed=seed, steps=PACED_STEPS if steps is None else steps)
        found = run_paced_demo(given, Console(stderr=as_json))
        if as_json:
            write_json(found)
        return
    from plexrl.cli.demo.report import report_json
    from plexrl.cli.demo.run import DemoOptions, run_demo

    options = DemoOptions(
        out=out,
        steps=STEPS if steps is None else steps,
        seed=seed,
        workers=workers,
        backend=backend,
        layout=None if layout is None else Parallelism.from_text(layout),
        isolated=isolated,
    )
    result = run_demo(options, Console(stderr=as_json))
    if as_json:
        write_json(report_json(result))
