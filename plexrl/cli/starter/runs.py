"""`plexrl run` and `plexrl runs`: controllers that run on the cluster."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.cli.terminal.context import (
    GIB,
    Access,
    Output,
    local_time,
    print_line,
    write_json,
    write_text,
)
from plexrl.cli.terminal.help import CommandGroup
from plexrl.cli.terminal.job_ids import new_lines
from plexrl.cli.terminal.option_groups import with_option_groups

if TYPE_CHECKING:
    from plexrl.client.calls.script_runs import ScriptRuns

runs_app = typer.Typer(
    cls=CommandGroup, help="Scripts that run on the cluster.", no_args_is_help=True
)
LIVE = ("waiting", "running")
LOOK_S = 1.0
RunArgument = Annotated[str, typer.Argument(help="The run's id.")]
Lines = Annotated[int, typer.Option(help="Last lines.")]


@with_option_groups
def run(
    script: Annotated[Path, typer.Argument(help="The script, a Python file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its arguments, after `--`.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="A file beside the script; may be repeated.")
    ] = None,
    memory_gib: Annotated[float, typer.Option(help="Memory of each of its processes.")] = 2.0,
    hours: Annotated[float, typer.Option(help="Time after which it is killed.")] = 24.0,
    restarts: Annotated[int, typer.Option(help="Starts again, if it fails or is killed.")] = 3,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what it prints until it has ended.")
    ] = False,
    *,
    access: Access,
    output: Output,
) -> None:
    """Run a controller on the cluster, in a sandbox of its head, with a key of its own.

    The exit code of `-f` is 1 unless the script completes.
    """
    with access.open() as cluster:
        view = cluster.runs.start(
            script,
            arguments or (),
            files=file or (),
            memory_bytes=round(memory_gib * GIB),
            wall_s=hours * 3600,
            restarts=restarts,
        )
        if output.as_json and not follow:
            write_json(view)
        elif not output.as_json:
            print_line(f"{view['run']} runs {script.name}: plexrl runs log -f {view['run']}")
        if follow:
            _follow(cluster.runs, view["run"], 1000)


@runs_app.command("list")
@with_option_groups
def list_runs(access: Access, output: Output) -> None:
    """All runs, with their states."""
    with access.open() as cluster:
        found = cluster.runs.list()
    output.table(
        {
            "run": "run",
            "tenant": "tenant",
            "script": "script",
            "state": "state",
            "attempts": "attempts",
            "created": lambda each: local_time(each["created_at"]),
            "reason": "reason",
        },
        found,
    )


@runs_app.command("log")
@with_option_groups
def log(
    run: RunArgument,
    lines: Lines = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until it has ended.")
    ] = False,
    *,
    access: Access,
) -> None:
    """What a run has printed, over all of its attempts."""
    with access.open() as cluster:
        if follow:
            _follow(cluster.runs, run, lines)
        else:
            write_text(f"{cluster.runs.log(run, lines=lines)}\n")


@runs_app.command("stop")
@with_option_groups
def stop(run: RunArgument, access: Access) -> None:
    """Stop a run, and cancel its job."""
    with access.open() as cluster:
        cluster.runs.stop(run)
    print_line(f"{run} is stopping.")


def _follow(runs: "ScriptRuns", run: str, lines: int) -> None:
    """Print new lines until the run has ended."""
    shown: list[str] = []
    while True:
        view = runs.get(run)
        now = runs.log(run, lines=max(lines, 1000)).splitlines()
        for line in new_lines(shown, now):
            write_text(f"{line}\n")
        shown = now
        if view["state"] not in LIVE:
            if view["state"] != "completed":
                print_line(f"{run} is {view['state']}: {view['reason']}")
                raise typer.Exit(1)
            return
        time.sleep(LOOK_S)
