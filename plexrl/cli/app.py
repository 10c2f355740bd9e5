"""The `plexrl` command line: all commands and the entry point."""

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from plexrl.cli.cluster.config import config_app
from plexrl.cli.cluster.events import events
from plexrl.cli.cluster.node import node_app
from plexrl.cli.cluster.nodes import groups, nodes_app, status
from plexrl.cli.cluster.statemanager import statemanager, statemanager_status
from plexrl.cli.cluster.tenants import tenants_app
from plexrl.cli.cluster.up.command import up
from plexrl.cli.cluster.usage import usage
from plexrl.cli.demo.command import demo
from plexrl.cli.jobs.cancel import cancel
from plexrl.cli.jobs.checkpoints import checkpoints_app
from plexrl.cli.jobs.explain import explain
from plexrl.cli.jobs.jobs import jobs, logs
from plexrl.cli.jobs.metrics import metrics
from plexrl.cli.jobs.operations import operations, trace
from plexrl.cli.jobs.rollouts import rollouts
from plexrl.cli.jobs.samples import samples
from plexrl.cli.simulate.command import simulate
from plexrl.cli.simulate.compare import compare
from plexrl.cli.simulate_rollout.allocate import allocate_rollout
from plexrl.cli.simulate_rollout.command import simulate_rollout
from plexrl.cli.simulate_rollout.plan import plan_rollout
from plexrl.cli.starter.command import init
from plexrl.cli.starter.runs import run, runs_app
from plexrl.cli.terminal.context import warn, warn_lines, write_json, write_text
from plexrl.cli.terminal.help import CommandGroup, PanelCommand
from plexrl.cli.traces.command import traces_app
from plexrl.cli.traces.fidelity import fidelity
from plexrl.cli.traces.forecast import forecast
from plexrl.errors import ConfigError, PlexRLError, TraceError

COMPARE = "simulate compare"


class Commands(CommandGroup):
    """The commands. `simulate compare` is a command of its own, although `simulate` takes a trace;
    a trace file named compare is given as `./compare`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command, its name and its arguments."""
        if args[:2] == COMPARE.split():
            args = [COMPARE, *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="plexrl",
    cls=Commands,
    help="Run the language models of many RL jobs on one shared GPU cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Boxes break words at 80 columns, and programs cannot parse them.
    rich_markup_mode=None,
)
for command in (
    *(init, up, events, status, jobs, explain, cancel, metrics, samples, logs, groups, usage, demo),
    *(run, statemanager, statemanager_status, operations, rollouts, trace),
):
    app.command()(command)
app.command(cls=PanelCommand)(simulate)
app.command(COMPARE)(compare)
app.command("simulate-rollout", cls=PanelCommand)(simulate_rollout)
app.command("plan-rollout")(plan_rollout)
app.command("allocate-rollout", cls=PanelCommand)(allocate_rollout)
app.command()(fidelity)
app.command()(forecast)
app.add_typer(nodes_app, name="nodes")
app.add_typer(node_app, name="node")
app.add_typer(config_app, name="config")
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(runs_app, name="runs")
app.add_typer(tenants_app, name="tenants")
app.add_typer(traces_app, name="traces")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        write_text(f"plexrl {version('plexrl')}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM execution for RL with verifiable rewards, as a shared service of the cluster."""
    del version


def run_command(command: Callable[[], Any]) -> int:
    """Run the command line; a typed error becomes one message and exit code 1."""
    try:
        command()
    except PlexRLError as error:
        if "--json" in sys.argv:
            write_json({"error": error.to_wire()})
        else:
            # Only the faults of a file have several lines.
            report = warn_lines if isinstance(error, TraceError | ConfigError) else warn
            report(f"plexrl: {error.message}")
        return 1
    return 0


def main() -> None:
    """The console script."""
    # Who reads followed output through a pipe gets each line when it is printed.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    sys.exit(run_command(app))


if __name__ == "__main__":
    main()
