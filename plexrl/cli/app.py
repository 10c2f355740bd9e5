"""The `plexrl` command line: all commands and the entry point."""

import io
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import typer

from plexrl.cli.terminal.context import warn, warn_lines, write_json, write_text
from plexrl.cli.terminal.help import PanelGroup, Panels
from plexrl.errors import ConfigError, PlexRLError, TraceError

COMPARE = "simulate compare"
PANELS: Panels = {
    "Jobs": {
        "init": ("starter.command:init", "Write a starter project with a controller."),
        "demo": ("demo.command:demo", "Train two jobs on one shared group; write a report."),
        "run": ("starter.runs:run", "Run a controller on the cluster, in a sandbox."),
        "runs": ("starter.runs:runs_app", "Controllers that run on the cluster."),
        "jobs": ("jobs.jobs:jobs", "Which jobs run, which wait, where their models are."),
        "quote": ("starter.quote:quote", "When a job would start and end, and what it would cost."),
        "rewind": ("starter.time_machine:rewind", "Set a job back to a step that it has kept."),
        "fork": ("starter.time_machine:fork", "Run forks of a job from a step that it has kept."),
        "explain": ("jobs.explain:explain", "Why a job waits or runs as it does, and until when."),
        "cancel": ("jobs.cancel:cancel", "Cancel jobs; their checkpoints stay."),
        "logs": ("jobs.jobs:logs", "The last lines of a job's worker logs."),
        "rollouts": (
            "jobs.rollouts:rollouts",
            "Asynchronous rollouts: staleness, load of instances.",
        ),
    },
    "Data of jobs": {
        "metrics": ("jobs.metrics:metrics", "Metrics of a job: the newest rows, or a plot."),
        "samples": ("jobs.samples:samples", "Samples of a job's step: text, reward, length."),
        "checkpoints": (
            "jobs.checkpoints:checkpoints_app",
            "Checkpoints of jobs, finished or in progress.",
        ),
        "operations": (
            "jobs.operations:operations",
            "Times of a job's operations: queue, switch, compute.",
        ),
        "trace": ("jobs.operations:trace", "Write a trace of operations for Perfetto."),
    },
    "Run a cluster": {
        "up": ("cluster.up.command:up", "Run a cluster until Ctrl-C."),
        "status": (
            "cluster.observe.status:status",
            "What is wrong, and the cluster in a few numbers.",
        ),
        "doctor": (
            "cluster.observe.doctor:doctor",
            "What is wrong, with the command that mends it.",
        ),
        "top": ("cluster.observe.top:top", "GPUs by state and queues, refreshed in place."),
        "nodes": ("cluster.nodes:nodes_app", "Nodes and their GPUs; drain, undrain, remove."),
        "node": ("cluster.node:node_app", "Machines that join a cluster."),
        "groups": ("cluster.nodes:groups", "Node groups: holders, members, switches (operator)."),
        "tenants": (
            "cluster.tenants:tenants_app",
            "Tenants, weights, quotas (operator).",
        ),
        "keys": ("cluster.keys:keys_app", "API keys of users and services, with roles."),
        "login": ("cluster.keys:login", "Log in on a cluster in a browser."),
        "logout": ("cluster.keys:logout", "End the login on a cluster."),
        "audit": ("cluster.keys:audit", "Who changed what, and who was refused."),
        "usage": ("cluster.observe.usage:usage", "GPU-hours used, and saved by sharing."),
        "dashboard": (
            "cluster.observe.dashboard:dashboard",
            "The operator's page of a journal, or of a demo cluster.",
        ),
        "history": ("cluster.observe.history:history_app", "The archive of what happened, by day."),
        "config": ("cluster.config:config_app", "Check and show configuration files."),
        "events": (
            "cluster.observe.events:events",
            "Follow a cluster's events at its MQTT broker.",
        ),
        "statemanager": ("cluster.statemanager:statemanager", "Run a node's StateManager."),
        "statemanager-status": (
            "cluster.statemanager:statemanager_status",
            "What this node's StateManager stores and does.",
        ),
    },
    "Plan a cluster": {
        "simulate": (
            "simulate.command:simulate",
            "Run a trace through the scheduler on a virtual clock.",
        ),
        "simulate compare": (
            "simulate.compare:compare",
            "Compare two results of `plexrl simulate --out`.",
        ),
        "traces": (
            "traces.command:traces_app",
            "Traces of jobs: check, convert, generate, record.",
        ),
        "forecast": (
            "traces.forecast:forecast",
            "Predict the cycle times of a mix of recorded jobs.",
        ),
        "fidelity": (
            "traces.fidelity:fidelity",
            "Compare measured cycle times with the simulator's.",
        ),
        "plan-rollout": (
            "simulate_rollout.plan:plan_rollout",
            "Which rollout mode would pay for a job.",
        ),
        "simulate-rollout": (
            "simulate_rollout.command:simulate_rollout",
            "Simulate rollout and training of one job.",
        ),
        "allocate-rollout": (
            "simulate_rollout.allocate:allocate_rollout",
            "How many GPUs for generation, how many for training.",
        ),
    },
}
"""All commands, by who needs them. The text of a command fits one line of 80 columns."""


class Commands(PanelGroup):
    """The commands. `simulate compare` is a command of its own, although `simulate` takes a trace;
    a trace file named compare is given as `./compare`."""

    PANELS: ClassVar[Panels] = PANELS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the command, its name and its arguments."""
        if args[:2] == COMPARE.split():
            args = [COMPARE, *args[2:]]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="plexrl",
    cls=Commands,
    help="Run the language models of many RL jobs on one shared GPU cluster.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    # Boxes break words at 80 columns, and programs cannot parse them.
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        write_text(f"plexrl {version('plexrl')}\n")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM execution for RL with verifiable rewards, as a shared service of the cluster."""
    del version
    if context.invoked_subcommand is None:
        from plexrl.cli.terminal.welcome import welcome

        welcome()


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
